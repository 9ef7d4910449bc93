"""The client's half of a Put: one side sends blocks as credit allows, the other collects credit and results.

A stream that breaks in mid-object is followed by one that goes on at the byte the service has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.duration import to_duration
from katydid_runtime.errors import DataCorruptError, InvalidRequestError, UnavailableError
from xxhash import xxh3_128_digest

from katydid_cache.asking import signed
from katydid_cache.layout import Span
from katydid_cache.records import Durability, PutBlock, PutOutcome, PutRefusal, PutStatus
from katydid_cache.resuming import Again, Resuming, failure_of
from katydid_cache.wire import encode_put_frame

__all__ = ["PutCall", "PutTerms", "check_payloads", "put_start"]


@dataclass(frozen=True, slots=True)
class PutTerms:
    """What holds for all blocks of one put; see `CacheClient.put`. `deadline` is on the monotonic clock."""

    durability: Durability
    heads: Span
    tenant: bytes
    ttl_s: float | None
    sliding: bool
    hold_s: float | None
    deadline: float


class PutCall:
    """Sends `blocks` in frames of at most `frame_bytes`. `outcomes` can be asked for at any time."""

    def __init__(self, blocks: Sequence[PutBlock], frame_bytes: int) -> None:
        self._blocks = blocks
        self._frame_bytes = frame_bytes
        self._outcomes: dict[int, PutOutcome] = {}
        # Blocks of which some frames were sent: a stream that follows asks where to go on with them.
        self._begun: set[int] = set()
        self._sent_bytes = 0
        # Of the stream that runs now: its blocks, credit, and from where on the service wants a block.
        self._asked: list[int] = []
        self._credit = 0
        self._resumes: dict[int, int] = {}
        self._news = asyncio.Event()

    async def run(self, stream: Callable[[], Any], start: pb.PutStart, again: Again) -> None:
        """Send what is not answered; where a stream breaks that had moved something, the next one goes on from there.

        `stream` opens a call, `again` waits for the attachment to go on with (0: none). Raises the service's errors.
        """
        resuming = Resuming(again)
        while True:
            before = self._sent_bytes, len(self._outcomes)
            call = stream()
            try:
                await self._attempt(call, start)
                return
            except (grpc.RpcError, UnavailableError) as error:
                failure = failure_of(error) if isinstance(error, grpc.RpcError) else error
                moved = before != (self._sent_bytes, len(self._outcomes))
                if not (attachment := await resuming.after(failure, moved=moved)):
                    raise failure from error
                start.attachment = attachment
            finally:
                call.cancel()

    def outcomes(self, unanswered: PutRefusal) -> list[PutOutcome]:
        """One outcome a block; those that were not answered are refused as `unanswered`."""
        refused = PutOutcome(PutStatus.REFUSED, unanswered)
        return [self._outcomes.get(index, refused) for index in range(len(self._blocks))]

    async def _attempt(self, call: Any, start: pb.PutStart) -> None:
        self._asked = [index for index in range(len(self._blocks)) if index not in self._outcomes]
        self._credit, self._resumes = 0, {}
        receiving = asyncio.create_task(self._receive(call))
        try:
            await call.write(pb.PutRequest(start=start).SerializeToString())
            for number, index in enumerate(self._asked):
                if not await self._send(call, receiving, number, index):
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

    async def _send(self, call: Any, receiving: asyncio.Task[None], number: int, index: int) -> bool:
        """Send one block, or as much of it as the service wants; False when the call is over."""
        block, resume = self._blocks[index], index in self._begun
        payload = memoryview(block.payload).cast("B")
        header = pb.PutBlock(
            index=number, hash=block.hash, parent=block.parent, checksum=xxh3_128_digest(payload), resume=resume
        )
        await call.write(pb.PutRequest(block=header).SerializeToString())
        if resume and not await self._until(receiving, index, lambda: number in self._resumes):
            return False
        for offset in range(self._resumes.get(number, 0), len(payload), self._frame_bytes):
            size = min(self._frame_bytes, len(payload) - offset)
            if not await self._until(receiving, index, partial(self._may_send, size)):
                return False
            if index in self._outcomes:
                break
            self._credit -= size
            self._begun.add(index)
            self._sent_bytes += size
            await call.write(encode_put_frame(number, offset, [payload[offset : offset + size]]))
        return True

    def _may_send(self, size: int) -> bool:
        return self._credit >= size

    async def _until(self, receiving: asyncio.Task[None], index: int, met: Callable[[], bool]) -> bool:
        """Wait for the service to say something, or what became of the block; False when the call is over."""
        while not met() and index not in self._outcomes:
            if receiving.done():
                return False
            self._news.clear()
            await self._news.wait()
        return True

    async def _receive(self, call: Any) -> None:
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                response = pb.PutResponse.FromString(message)
                kind = response.WhichOneof("message")
                if kind == "credit":
                    self._credit += response.credit.bytes
                elif kind == "resume":
                    self._resumes[response.resume.index] = response.resume.received
                elif response.result.index < len(self._asked):
                    self._outcomes[self._asked[response.result.index]] = _outcome(response.result)
                else:
                    raise DataCorruptError(f"an answer for block {response.result.index}, which was not announced")
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


def put_start(attachment: int, terms: PutTerms) -> pb.PutStart:
    """The first message of a Put."""
    start = pb.PutStart(
        attachment=attachment,
        tenant=terms.tenant,
        durability=pb.Durability.ValueType(terms.durability),
        heads=pb.HeadRange(first=terms.heads.first, count=terms.heads.count),
    )
    if terms.ttl_s is not None:
        start.ttl.CopyFrom(to_duration(terms.ttl_s))
        start.sliding = terms.sliding
    if terms.hold_s is not None:
        start.hold.CopyFrom(to_duration(terms.hold_s))
    return signed(start)


def _outcome(result: pb.PutResult) -> PutOutcome:
    status = PutStatus(result.status)
    return PutOutcome(status, PutRefusal(result.refusal) if status is PutStatus.REFUSED else None)
