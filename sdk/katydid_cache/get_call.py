"""The client's half of a Get: frames go straight into the caller's buffers, checked before they count."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.block_hash import HASH_BYTES, split_hashes
from katydid_runtime.duration import to_seconds
from katydid_runtime.errors import DataCorruptError, InvalidRequestError
from xxhash import xxh3_128_digest

from katydid_cache.records import BlockMissReason, GetResult, Tier, TierTime
from katydid_cache.resuming import Again, Resuming, failure_of
from katydid_cache.wire import Frame, decode_get_response

__all__ = ["WINDOW_BYTES", "GetCall", "byte_buffers", "tier_time"]

WINDOW_BYTES = 16 * 1024 * 1024


class GetCall:
    """Receives the blocks `hashes` (packed) into `into`. `result` can be asked for at any time, after a failure too."""

    def __init__(self, hashes: bytes, into: Sequence[memoryview]) -> None:
        self._hashes = split_hashes(hashes)
        self._into = into
        self._received = [0] * len(into)
        self._found = [False] * len(into)
        self._misses: dict[int, BlockMissReason] = {}
        self._times: dict[Tier, TierTime] = {}
        # Of the stream that runs now: which blocks it is asked for, and their headers.
        self._asked: list[int] = []
        self._headers: dict[int, pb.BlockHeader] = {}

    @property
    def complete(self) -> bool:
        """Whether all blocks have arrived."""
        return all(self._found)

    @property
    def missing(self) -> list[int]:
        """Blocks that have not arrived."""
        return [index for index, found in enumerate(self._found) if not found]

    def take_over(self, found: Sequence[bool], times: Iterable[TierTime]) -> None:
        """Blocks that are in their buffers already, and from which tiers they came."""
        self._found = [before or now for before, now in zip(self._found, found, strict=True)]
        for time in times:
            if time.blocks:
                self._add(time)

    async def run(self, stream: Callable[[], Any], start: pb.GetStart, again: Again) -> None:
        """Fetch what is missing; where a stream breaks that had sent something, the next one goes on at that byte.

        `stream` opens a call, `again` waits for the attachment to go on with (0: none). Raises the service's
        errors, and DataCorruptError for an answer that makes no sense.
        """
        resuming = Resuming(again)
        while True:
            received = sum(self._received)
            call = stream()
            try:
                await self._receive(call, start)
                return
            except grpc.RpcError as error:
                failure, moved = failure_of(error), sum(self._received) > received
                if not (attachment := await resuming.after(failure, moved=moved)):
                    raise failure from error
                start.attachment = attachment
            finally:
                call.cancel()

    def result(self, unanswered: BlockMissReason) -> GetResult:
        """What arrived; blocks that were not answered are misses with the reason `unanswered`."""
        missing = {index: unanswered for index, found in enumerate(self._found) if not found}
        return GetResult(tuple(self._found), missing | self._misses, tuple(self._times.values()))

    async def _receive(self, call: Any, start: pb.GetStart) -> None:
        self._asked = [index for index, found in enumerate(self._found) if not found and index not in self._misses]
        self._headers = {}
        start.hashes = b"".join(self._hashes[index] for index in self._asked)
        start.have[:] = [self._received[index] for index in self._asked]
        start.credit = WINDOW_BYTES
        await _write(call, pb.GetRequest(start=start))
        consumed = 0
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                raise DataCorruptError("the service ended a Get without a summary")
            response = decode_get_response(message)
            if isinstance(response, Frame):
                self._frame(response)
                consumed += len(response.data)
                if consumed >= WINDOW_BYTES // 2:
                    await _write(call, pb.GetRequest(credit=pb.Credit(bytes=consumed)))
                    consumed = 0
                continue
            kind = response.WhichOneof("message")
            if kind == "block":
                self._block(response.block)
            elif kind == "miss":
                self._misses[self._index(response.miss.index)] = BlockMissReason(response.miss.reason)
            elif kind == "summary":
                for time in response.summary.times:
                    self._add(tier_time(time))
                await call.done_writing()
                await call.read()
                return

    def _block(self, header: pb.BlockHeader) -> None:
        index = self._index(header.index)
        if header.bytes != len(self._into[index]):
            raise DataCorruptError(f"block {index} has {header.bytes} bytes, its buffer another size")
        self._headers[index] = header
        if self._received[index] == header.bytes:
            self._check(index)

    def _frame(self, frame: Frame) -> None:
        size, rest = divmod(len(frame.data), frame.blocks)
        if rest:
            raise DataCorruptError(f"a frame of {len(frame.data)} bytes for {frame.blocks} blocks")
        for number in range(frame.blocks):
            self._part(self._index(frame.index + number), frame.offset, frame.data[size * number : size * (number + 1)])

    def _part(self, index: int, offset: int, data: memoryview) -> None:
        header = self._headers.get(index)
        if header is None:
            raise DataCorruptError(f"a frame of block {index} without its header")
        end = offset + len(data)
        if offset != self._received[index] or end > header.bytes:
            raise DataCorruptError(f"a frame of block {index} at {offset} is out of place")
        self._into[index][offset:end] = data
        self._received[index] = end
        if end == header.bytes:
            self._check(index)

    def _check(self, index: int) -> None:
        if xxh3_128_digest(self._into[index]) == self._headers[index].checksum:
            self._found[index] = True
        else:
            self._misses[index] = BlockMissReason.CORRUPT

    def _index(self, asked: int) -> int:
        """The block meant by a number of the stream."""
        if asked >= len(self._asked):
            raise DataCorruptError(f"an answer for block {asked}, which was not asked for")
        return self._asked[asked]

    def _add(self, time: TierTime) -> None:
        before = self._times.get(time.tier, TierTime(time.tier, 0, 0.0))
        self._times[time.tier] = TierTime(time.tier, before.blocks + time.blocks, before.duration_s + time.duration_s)


async def _write(call: Any, request: pb.GetRequest) -> None:
    # A call that has ended says how to who reads it.
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(request.SerializeToString())


def tier_time(time: pb.TierTime) -> TierTime:
    """The record of a TierTime message."""
    return TierTime(Tier(time.tier), time.blocks, to_seconds(time.duration))


def byte_buffers(into: Sequence[memoryview], packed_bytes: int, size: int) -> list[memoryview]:
    """The caller's buffers as bytes, one a hash. Raises InvalidRequestError for one that does not fit."""
    if packed_bytes != HASH_BYTES * len(into):
        raise InvalidRequestError(
            f"{len(into)} buffers for {packed_bytes} bytes of hashes",
            field="into",
            value=len(into),
            allowed=f"one buffer for each {HASH_BYTES} bytes",
        )
    buffers = [memoryview(buffer).cast("B") for buffer in into]
    for index, buffer in enumerate(buffers):
        if len(buffer) != size or buffer.readonly:
            raise InvalidRequestError(
                f"buffer {index} has {len(buffer)} bytes{' and is read-only' if buffer.readonly else ''}",
                field=f"into[{index}]",
                value=len(buffer),
                allowed=f"{size} writable bytes",
            )
    return buffers
