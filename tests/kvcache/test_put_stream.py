"""What a Put stream refuses: every break of the protocol by name, and nothing of it is left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache.wire import encode_put_frame
from katydid_kvcache.put_stream import PutStream
from katydid_runtime.errors import InvalidRequestError
from xxhash import xxh3_128_digest

from tests.kvcache.inside import BLOCK, key, opened, payload
from tests.kvcache.running import MIB, run

START = pb.PutRequest(start=pb.PutStart())
HALF = BLOCK // 2


def block(index: int, name: int = 1) -> bytes:
    header = pb.PutBlock(index=index, hash=key(name), checksum=xxh3_128_digest(payload(name)))
    return pb.PutRequest(block=header).SerializeToString()


def frame(index: int, offset: int, size: int) -> bytes:
    return encode_put_frame(index, offset, [payload(1)[offset : offset + size].ljust(size, b"x")])


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([block(0)], "message"),
        ([b"start", b"start"], "message"),
        ([b"start", b"\xff\xff"], "message"),
        ([b"start", frame(0, 0, HALF)], "frame.index"),
        ([b"start", block(1)], "index"),
        ([b"start", block(0), block(0, 2)], "index"),
        ([b"start", block(0), frame(1, 0, HALF)], "frame.index"),
        ([b"start", block(0), frame(0, HALF, HALF)], "frame"),
        ([b"start", block(0), frame(0, 0, HALF), frame(0, 0, HALF)], "frame"),
        ([b"start", block(0), frame(0, 0, HALF), frame(0, HALF, HALF + 1)], "frame"),
        ([b"start", block(0), frame(0, 0, 0)], "frame"),
    ],
)
def test_a_break_of_the_protocol_is_named_and_leaves_nothing(messages: Sequence[bytes], field: str) -> None:
    async def scenario() -> None:
        async with opened() as (cache, space):
            start = pb.PutRequest(start=pb.PutStart(attachment=cache.attachments.join(space, arena=False).id))

            async def sent() -> AsyncIterator[bytes]:
                for message in messages:
                    yield start.SerializeToString() if message == b"start" else message

            async def answer(_message: bytes) -> None:
                pass

            with pytest.raises(InvalidRequestError) as caught:
                await PutStream(cache, sent(), answer).run()
            assert caught.value.field == field
            assert not space.blocks

    run(scenario)


def test_more_than_was_credited_is_refused() -> None:
    async def scenario() -> None:
        async with opened(memory_bytes=8 * MIB, stream_window_bytes=MIB) as (cache, space):
            start = pb.PutStart(attachment=cache.attachments.join(space, arena=False).id)
            credit = 0

            async def sent() -> AsyncIterator[bytes]:
                yield pb.PutRequest(start=start).SerializeToString()
                for index in range(2 * credit // BLOCK):
                    yield block(index, index + 1)
                    yield encode_put_frame(index, 0, [payload(index + 1)])

            async def answer(message: bytes) -> None:
                nonlocal credit
                response = pb.PutResponse.FromString(message)
                credit += response.credit.bytes

            await PutStream(cache, sent(), answer).run()
            assert len(space.blocks) == 2 * MIB // BLOCK, "what is consumed is credited anew"

            stream = PutStream(cache, sent(), answer)
            stream._grant = lambda _: answer(b"")  # type: ignore[method-assign]
            with pytest.raises(InvalidRequestError, match="more than it had credit for"):
                await stream.run()

    run(scenario)
