"""Frames of Get and Put, encoded and decoded by hand: standard protobuf bytes at one copy a frame instead of three.

The protobuf runtime copies a payload when it is set, again when it is serialised and again when it is parsed. Here a
frame is joined once from the cache's memory, and a received one is a view of the bytes gRPC delivered. Only the usual
encoding (index, offset, data, blocks, in this order) takes the fast way; every other valid one is left to protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.errors import InvalidRequestError

from katydid_cache.records import Buffer

__all__ = ["Frame", "decode_get_response", "decode_put_request", "encode_get_frame", "encode_put_frame"]

_GET_FRAME_TAG = 2 << 3 | 2
_PUT_FRAME_TAG = 3 << 3 | 2
_INDEX_TAG, _OFFSET_TAG, _DATA_TAG, _BLOCKS_TAG = 1 << 3, 2 << 3, 3 << 3 | 2, 4 << 3
_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class Frame:
    """`data` belongs at byte `offset` of the payload of block `index` of the stream.

    In a Get it is the same range of `blocks` consecutive blocks, in equal parts.
    """

    index: int
    offset: int
    data: memoryview
    blocks: int = 1


def encode_get_frame(index: int, offset: int, pieces: Sequence[Buffer], blocks: int = 1) -> bytes:
    """A serialised GetResponse with one frame whose data is `pieces` in a row, of so many blocks."""
    return _encode(_GET_FRAME_TAG, index, offset, pieces, blocks)


def encode_put_frame(index: int, offset: int, pieces: Sequence[Buffer]) -> bytes:
    """A serialised PutRequest with one frame whose data is `pieces` in a row."""
    return _encode(_PUT_FRAME_TAG, index, offset, pieces, 1)


def decode_get_response(message: bytes) -> Frame | pb.GetResponse:
    """What the service sent. Raises InvalidRequestError for bytes that are no GetResponse."""
    frame = _decode(_GET_FRAME_TAG, message)
    if frame is not None:
        return frame
    try:
        response = pb.GetResponse.FromString(message)
    except DecodeError as error:
        raise _malformed("GetResponse", message) from error
    return _unpack(response.frame) if response.WhichOneof("message") == "frame" else response


def decode_put_request(message: bytes) -> Frame | pb.PutRequest:
    """What a client sent. Raises InvalidRequestError for bytes that are no PutRequest."""
    frame = _decode(_PUT_FRAME_TAG, message)
    if frame is not None:
        return frame
    try:
        request = pb.PutRequest.FromString(message)
    except DecodeError as error:
        raise _malformed("PutRequest", message) from error
    return _unpack(request.frame) if request.WhichOneof("message") == "frame" else request


def _unpack(frame: pb.Frame) -> Frame:
    return Frame(frame.index, frame.offset, memoryview(frame.data), frame.blocks or 1)


def _malformed(what: str, message: bytes) -> InvalidRequestError:
    return InvalidRequestError(f"{len(message)} bytes are no {what}", field="message", allowed=f"a serialised {what}")


def _encode(tag: int, index: int, offset: int, pieces: Sequence[Buffer], blocks: int) -> bytes:
    size = sum(len(piece) for piece in pieces)
    head, tail = bytearray(), bytearray()
    for field_tag, value in ((_INDEX_TAG, index), (_OFFSET_TAG, offset)):
        if value:
            head.append(field_tag)
            _append_varint(head, value)
    head.append(_DATA_TAG)
    _append_varint(head, size)
    if blocks > 1:
        tail.append(_BLOCKS_TAG)
        _append_varint(tail, blocks)
    outer = bytearray((tag,))
    _append_varint(outer, len(head) + size + len(tail))
    return b"".join((outer, head, *pieces, tail))


def _decode(tag: int, message: bytes) -> Frame | None:
    """The frame, or None when the message is anything but a frame in the usual encoding."""
    if not message or message[0] != tag:
        return None
    size, at = _varint(message, 1)
    if at is None or at + size != len(message):
        return None
    values = [0, 0]
    for place, field_tag in enumerate((_INDEX_TAG, _OFFSET_TAG)):
        if at < len(message) and message[at] == field_tag:
            values[place], after = _varint(message, at + 1)
            if after is None:
                return None
            at = after
    if at >= len(message) or message[at] != _DATA_TAG:
        return None
    size, first = _varint(message, at + 1)
    if first is None or first + size > len(message):
        return None
    end, blocks = first + size, 1
    if end < len(message):
        if message[end] != _BLOCKS_TAG:
            return None
        blocks, after = _varint(message, end + 1)
        if after != len(message) or not blocks:
            return None
    return Frame(values[0], values[1], memoryview(message)[first:end], blocks)


def _append_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _varint(message: bytes, at: int) -> tuple[int, int | None]:
    """The varint at `at` and the position behind it; None when it is cut off or too long."""
    value = 0
    for place, byte in enumerate(message[at : at + _VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    return 0, None
