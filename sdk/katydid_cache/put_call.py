"""The client's half of a Put: one side sends blocks as credit allows, the other collects credit and results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.duration import to_duration
from katydid_runtime.errors import InvalidRequestError, UnavailableError
from xxhash import xxh3_128_digest

from katydid_cache.asking import signed
from katydid_cache.layout import Span
from katydid_cache.records import Durability, PutBlock, PutOutcome, PutRefusal, PutStatus
from katydid_cache.wire import encode_put_frame

__all__ = ["PutCall", "check_payloads", "put_start"]


class PutCall:
    """Sends `blocks` in frames of at most `frame_bytes`. `outcomes` can be asked for at any time."""

    def __init__(self, blocks: Sequence[PutBlock], frame_bytes: int) -> None:
        self._blocks = blocks
        self._frame_bytes = frame_bytes
        self._credit = 0
        self._news = asyncio.Event()
        self._outcomes: dict[int, PutOutcome] = {}

    async def run(self, call: Any, start: pb.PutStart) -> None:
        """Serve `call` to its end. Raises grpc.RpcError."""
        receiving = asyncio.create_task(self._receive(call))
        try:
            await call.write(pb.PutRequest(start=start).SerializeToString())
            for index, block in enumerate(self._blocks):
                if not await self._send(call, receiving, index, block):
                    break
            else:
                await call.done_writing()
            await receiving
        except (asyncio.InvalidStateError, grpc.RpcError) as error:
            # The service ended the call while it was written to: if anyone knows why, it is the receiving side.
            await receiving
            raise UnavailableError("the cache service ended a Put early") from error
        finally:
            receiving.cancel()

    def outcomes(self, unanswered: PutRefusal) -> list[PutOutcome]:
        """One outcome a block; those that were not answered are refused as `unanswered`."""
        refused = PutOutcome(PutStatus.REFUSED, unanswered)
        return [self._outcomes.get(index, refused) for index in range(len(self._blocks))]

    async def _send(self, call: Any, receiving: asyncio.Task[None], index: int, block: PutBlock) -> bool:
        """Send one block, or as much of it as the service wants; False when the call is over."""
        payload = memoryview(block.payload).cast("B")
        header = pb.PutBlock(index=index, hash=block.hash, parent=block.parent, checksum=xxh3_128_digest(payload))
        await call.write(pb.PutRequest(block=header).SerializeToString())
        for offset in range(0, len(payload), self._frame_bytes):
            size = min(self._frame_bytes, len(payload) - offset)
            while self._credit < size and index not in self._outcomes:
                if receiving.done():
                    return False
                self._news.clear()
                await self._news.wait()
            if index in self._outcomes:
                return True
            self._credit -= size
            await call.write(encode_put_frame(index, offset, [payload[offset : offset + size]]))
        return True

    async def _receive(self, call: Any) -> None:
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                response = pb.PutResponse.FromString(message)
                if response.WhichOneof("message") == "credit":
                    self._credit += response.credit.bytes
                else:
                    self._outcomes[response.result.index] = _outcome(response.result)
                self._news.set()
        finally:
            self._news.set()


def check_payloads(blocks: Sequence[PutBlock], size: int) -> None:
    """Raises InvalidRequestError for a payload that has not `size` bytes."""
    for index, block in enumerate(blocks):
        if memoryview(block.payload).nbytes != size:
            raise InvalidRequestError(
                f"payload {index} has {memoryview(block.payload).nbytes} bytes",
                field=f"blocks[{index}].payload",
                value=memoryview(block.payload).nbytes,
                allowed=f"{size} bytes",
            )


def put_start(
    attachment: int,
    durability: Durability,
    heads: Span,
    tenant: bytes,
    ttl_s: float | None,
    sliding: bool,
    hold_s: float | None,
) -> pb.PutStart:
    """The first message of a Put; see `CacheClient.put`."""
    start = pb.PutStart(
        attachment=attachment,
        tenant=tenant,
        durability=pb.Durability.ValueType(durability),
        heads=pb.HeadRange(first=heads.first, count=heads.count),
    )
    if ttl_s is not None:
        start.ttl.CopyFrom(to_duration(ttl_s))
        start.sliding = sliding
    if hold_s is not None:
        start.hold.CopyFrom(to_duration(hold_s))
    return signed(start)


def _outcome(result: pb.PutResult) -> PutOutcome:
    status = PutStatus(result.status)
    return PutOutcome(status, PutRefusal(result.refusal) if status is PutStatus.REFUSED else None)
