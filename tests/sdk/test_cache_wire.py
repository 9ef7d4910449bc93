"""Hand-made frames against the protobuf runtime, both ways, and what happens to bytes that are no message."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache.wire import (
    Frame,
    decode_get_response,
    decode_put_request,
    encode_get_frame,
    encode_put_frame,
)
from katydid_runtime.errors import InvalidRequestError

frames = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=300))


@given(frames, st.integers(0, 300))
def test_protobuf_reads_what_is_encoded(frame: tuple[int, int, bytes], split: int) -> None:
    index, offset, data = frame
    pieces = [data[:split], memoryview(data)[split:]]
    for parsed in (
        pb.GetResponse.FromString(encode_get_frame(index, offset, pieces)).frame,
        pb.PutRequest.FromString(encode_put_frame(index, offset, pieces)).frame,
    ):
        assert (parsed.index, parsed.offset, parsed.data) == frame


@given(frames)
def test_what_protobuf_encodes_is_decoded(frame: tuple[int, int, bytes]) -> None:
    index, offset, data = frame
    message = pb.Frame(index=index, offset=offset, data=data)
    for decoded in (
        decode_get_response(pb.GetResponse(frame=message).SerializeToString()),
        decode_put_request(pb.PutRequest(frame=message).SerializeToString()),
    ):
        assert isinstance(decoded, Frame)
        assert (decoded.index, decoded.offset, bytes(decoded.data)) == frame


@given(frames)
def test_any_valid_order_of_fields_is_decoded(frame: tuple[int, int, bytes]) -> None:
    index, offset, data = frame
    parts = [pb.Frame(data=data), pb.Frame(offset=offset), pb.Frame(index=index)]
    body = b"".join(part.SerializeToString() for part in parts)
    head = pb.PutRequest(frame=pb.Frame(data=bytes(len(body)))).SerializeToString()
    message = head[:1] + _varint(len(body)) + body
    assert pb.PutRequest.FromString(message).frame == pb.Frame(index=index, offset=offset, data=data)
    decoded = decode_put_request(message)
    assert isinstance(decoded, Frame)
    assert (decoded.index, decoded.offset, bytes(decoded.data)) == frame


def test_other_messages_pass() -> None:
    start = pb.PutRequest(start=pb.PutStart(attachment=3))
    assert decode_put_request(start.SerializeToString()) == start
    miss = pb.GetResponse(miss=pb.BlockMiss(index=1, reason=pb.BLOCK_MISS_REASON_ABSENT))
    assert decode_get_response(miss.SerializeToString()) == miss


@given(st.binary(max_size=60))
def test_noise_gives_a_message_or_a_typed_error(noise: bytes) -> None:
    for decode in (decode_get_response, decode_put_request):
        with contextlib.suppress(InvalidRequestError):
            decode(noise)


@given(frames, st.data())
def test_a_cut_or_flipped_frame_never_crashes(frame: tuple[int, int, bytes], data: st.DataObject) -> None:
    message = bytearray(encode_put_frame(frame[0], frame[1], [frame[2]]))
    at = data.draw(st.integers(0, len(message) - 1))
    message[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(message)))
    for damaged in (bytes(message), bytes(message[:cut])):
        try:
            decoded = decode_put_request(damaged)
        except InvalidRequestError:
            continue
        if isinstance(decoded, Frame):
            assert pb.PutRequest.FromString(damaged).frame.data == decoded.data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


PARTS = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda index: pb.Frame(index=index)),
    st.integers(0, 2**64 - 1).map(lambda offset: pb.Frame(offset=offset)),
    st.binary(max_size=40).map(lambda data: pb.Frame(data=data)),
    st.integers(0, 9).map(lambda blocks: pb.Frame(blocks=blocks)),
)


@given(st.lists(PARTS, max_size=7))
def test_whatever_comes_in_whatever_number_is_read_as_protobuf_reads_it(parts: list[pb.Frame]) -> None:
    body = b"".join(part.SerializeToString() for part in parts)
    expected = pb.Frame.FromString(body)
    for tag, decode in ((b"\x12", decode_get_response), (b"\x1a", decode_put_request)):
        decoded = decode(tag + _varint(len(body)) + body)
        assert isinstance(decoded, Frame)
        assert (decoded.index, decoded.offset, bytes(decoded.data)) == (expected.index, expected.offset, expected.data)
        assert decoded.blocks == (expected.blocks or 1)
