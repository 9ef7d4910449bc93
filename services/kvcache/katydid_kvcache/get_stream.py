"""One Get: blocks are brought into memory a few ahead, and leave in frames as the client's credit allows."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import islice

from google.protobuf.message import DecodeError
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache.layout import Span, cut
from katydid_cache.records import BlockMissReason, Tier
from katydid_cache.wire import encode_get_frame
from katydid_runtime.duration import to_duration
from katydid_runtime.errors import DeadlineExceededError, InvalidRequestError

from katydid_kvcache import requests
from katydid_kvcache.blocks import Namespace
from katydid_kvcache.cache import Cache
from katydid_kvcache.checksums import payload_checksum
from katydid_kvcache.reading import Reading

__all__ = ["GetStream"]

_AHEAD = 4
_LINGER_S = 1.0

Send = Callable[[bytes], Awaitable[None]]


class GetStream:
    """Serves one Get RPC: reads serialised GetRequests, sends serialised GetResponses.

    A lease that has run out is no error: blocks are pinned while they are read, and those that went are misses.
    """

    def __init__(self, cache: Cache, messages: AsyncIterator[bytes], send: Send) -> None:
        self._cache = cache
        self._messages = messages
        self._send = send
        self._credit = 0
        self._credited = asyncio.Event()
        self._no_more: InvalidRequestError | None = None
        self._stall_s = cache.settings.stream_stall_timeout_s
        self._times: dict[Tier, tuple[int, float]] = {}
        self.sent = 0
        self.missed = 0
        self.bytes = 0

    async def run(self) -> None:
        """Serve until every block is answered.

        Raises InvalidRequestError for a stream that breaks the protocol, DeadlineExceededError when the client gives no
        credit for too long.
        """
        start = await self._start()
        namespace = self._cache.attachments.find(start.attachment).namespace
        hashes = requests.hash_list(start.hashes)
        heads, layers = requests.span(start.heads), Span(start.first_layer, start.layers)
        runs = namespace.layout.runs(heads, layers)
        mask = namespace.mask(heads)
        self._credit = start.credit
        crediting = asyncio.create_task(self._collect_credit())
        ahead: deque[asyncio.Task[Reading | BlockMissReason]] = deque()
        try:
            remaining = iter(hashes)
            for index in range(len(hashes)):
                self._open_ahead(ahead, remaining, namespace, mask)
                started = time.monotonic()
                reading = await ahead[0]
                if isinstance(reading, BlockMissReason):
                    await self._miss(index, reading)
                else:
                    await self._block(index, reading, runs)
                    self._time(reading.tier, time.monotonic() - started)
                    self._cache.reader.close(reading)
                ahead.popleft()
            await self._send(pb.GetResponse(summary=self._summary()).SerializeToString())
            # The client may be about to send credit: to end the call under its pen would look like a failure to it.
            await asyncio.wait([crediting], timeout=_LINGER_S)
        finally:
            crediting.cancel()
            for task in ahead:
                await self._abandon(task)

    async def _start(self) -> pb.GetStart:
        try:
            async with asyncio.timeout(self._stall_s):
                request = _parse(await anext(self._messages, b""))
        except TimeoutError:
            raise DeadlineExceededError(f"the client sent nothing for {self._stall_s:g} s") from None
        if request.WhichOneof("message") != "start":
            raise InvalidRequestError("a Get begins with GetStart", field="message", allowed="start")
        return request.start

    def _open_ahead(
        self,
        ahead: deque[asyncio.Task[Reading | BlockMissReason]],
        remaining: Iterator[bytes],
        namespace: Namespace,
        mask: int,
    ) -> None:
        """Keep `_AHEAD` blocks on their way besides the one that is sent, so that disk reads overlap with sending."""
        for block_hash in islice(remaining, _AHEAD + 1 - len(ahead)):
            ahead.append(asyncio.create_task(self._cache.reader.open(namespace, block_hash, mask)))

    async def _collect_credit(self) -> None:
        """Add up what the client allows; leaves in `_no_more` why nothing will come after."""
        ending = InvalidRequestError(
            "the client closed its side without credit for the rest", field="credit", allowed="credit for all blocks"
        )
        try:
            async for message in self._messages:
                self._credit += _parse(message).credit.bytes
                self._credited.set()
        except InvalidRequestError as error:
            ending = error
        self._no_more = ending
        self._credited.set()

    async def _block(self, index: int, reading: Reading, runs: list[range]) -> None:
        view = reading.view
        size = sum(len(run) for run in runs)
        whole = size == len(view) and reading.block.complete
        checksum = reading.block.checksum if whole else payload_checksum(view, runs)
        header = pb.BlockHeader(index=index, bytes=size, checksum=checksum, tier=pb.Tier.ValueType(reading.tier))
        await self._send(pb.GetResponse(block=header).SerializeToString())
        for offset in range(0, size, requests.FRAME_BYTES):
            length = min(requests.FRAME_BYTES, size - offset)
            await self._spend(length)
            pieces = [view[part.start : part.stop] for part in cut(runs, offset, length)]
            await self._send(encode_get_frame(index, offset, pieces))
        self.sent += 1
        self.bytes += size

    async def _miss(self, index: int, reason: BlockMissReason) -> None:
        self.missed += 1
        miss = pb.BlockMiss(index=index, reason=pb.BlockMissReason.ValueType(reason))
        await self._send(pb.GetResponse(miss=miss).SerializeToString())

    async def _spend(self, size: int) -> None:
        """Wait for credit of `size` bytes and use it."""
        while self._credit < size:
            if self._no_more is not None:
                raise self._no_more
            self._credited.clear()
            try:
                async with asyncio.timeout(self._stall_s):
                    await self._credited.wait()
            except TimeoutError:
                raise DeadlineExceededError(f"the client gave no credit for {self._stall_s:g} s") from None
        self._credit -= size

    async def _abandon(self, task: asyncio.Task[Reading | BlockMissReason]) -> None:
        """Close what was opened ahead and is not needed."""
        task.cancel()
        try:
            reading = await task
        except asyncio.CancelledError:
            return
        if isinstance(reading, Reading):
            self._cache.reader.close(reading)

    def _time(self, tier: Tier, duration_s: float) -> None:
        blocks, total_s = self._times.get(tier, (0, 0.0))
        self._times[tier] = blocks + 1, total_s + duration_s

    def _summary(self) -> pb.GetSummary:
        times = [
            pb.TierTime(tier=pb.Tier.ValueType(tier), blocks=blocks, duration=to_duration(total_s))
            for tier, (blocks, total_s) in sorted(self._times.items())
        ]
        return pb.GetSummary(sent=self.sent, missed=self.missed, times=times)


def _parse(message: bytes) -> pb.GetRequest:
    try:
        return pb.GetRequest.FromString(message)
    except DecodeError:
        raise InvalidRequestError(
            f"{len(message)} bytes are no GetRequest", field="message", allowed="a serialised GetRequest"
        ) from None
