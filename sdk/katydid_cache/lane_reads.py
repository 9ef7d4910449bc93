"""Get over bulk lanes: whole blocks over raw TCP, in threads beside the loop, several lanes at a time.

A batch of blocks is asked for over gRPC and received on whichever lane is idle; the next batch is prepared by the
service meanwhile. Whatever does not arrive (a lane that broke, a block that is not there) is left to the stream, which
also knows the reason.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from katydid_runtime.block_hash import HASH_BYTES
from katydid_runtime.errors import KatydidError

from katydid_cache.lane import Lane, receive
from katydid_cache.pulls import LaneOffer
from katydid_cache.records import TierTime

__all__ = ["LEAST_BYTES", "LaneReads", "dialled_host"]

LEAST_BYTES = 4 * 1024 * 1024
"""Less than this goes by stream as fast."""

# A lane's share of a read goes in about four batches: the next is prepared while one is on its way.
_BATCHES = 4
_BATCH_BYTES = (8 * 1024 * 1024, 64 * 1024 * 1024)
_STALL_S = 2.0
_PAUSE_S = 5.0

OpenLane = Callable[[bytes], Awaitable[LaneOffer]]

logger = logging.getLogger(__name__)


class LaneReads:
    """`count` lanes at most to the service at `host`. After a lane broke they rest for a moment."""

    def __init__(self, host: str, count: int) -> None:
        self._host = host
        self._count = count
        self._port = 0
        self._idle: list[Lane] = []
        self._threads: ThreadPoolExecutor | None = None
        self._retry_at = 0.0

    def usable(self, size: int) -> bool:
        """Whether a read of `size` bytes should go this way."""
        return size >= LEAST_BYTES and self._count > 0 and time.monotonic() >= self._retry_at

    async def get(
        self,
        open_lane: OpenLane,
        port: int,
        hashes: bytes,
        into: Sequence[memoryview],
        wanted: Sequence[int],
        timeout_s: float,
    ) -> tuple[list[bool], list[TierTime]]:
        """Read the blocks whose place is in `wanted`; True for each that arrived within `timeout_s` and is right.

        Beside that, from which tiers they came.
        """
        if port != self._port:
            self.close()
            self._port = port
        found, times = [False] * len(into), list[TierTime]()
        size = len(into[0])
        share = size * len(wanted) // (_BATCHES * self._count)
        step = max(1, min(max(share, _BATCH_BYTES[0]), _BATCH_BYTES[1]) // size)
        batches = [wanted[start : start + step] for start in range(0, len(wanted), step)][::-1]
        prepared: list[tuple[Sequence[int], LaneOffer]] = []

        async def prepare() -> None:
            if batches:
                batch = batches.pop()
                offer = await open_lane(b"".join(hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)] for at in batch))
                prepared.append((batch, offer))

        async def serve() -> None:
            await prepare()
            while prepared:
                batch, offer = prepared.pop()
                following = asyncio.create_task(prepare())
                try:
                    await self._receive(batch, offer, into, found)
                    times.extend(offer.times)
                    await following
                finally:
                    following.cancel()

        lanes = [asyncio.create_task(serve()) for _ in range(min(self._count, len(batches)))]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*lanes)
        except (OSError, TimeoutError, KatydidError) as error:
            reason = str(error) or f"not done within {timeout_s:g} s"
            logger.warning("bulk lane broke: %s", reason, extra={"host": self._host, "port": port})
            self._retry_at = time.monotonic() + _PAUSE_S
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
        return found, times

    def close(self) -> None:
        for lane in self._idle:
            lane.close()
        self._idle.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None

    async def _receive(
        self, batch: Sequence[int], offer: LaneOffer, into: Sequence[memoryview], found: list[bool]
    ) -> None:
        sent = [at for place, at in enumerate(batch) if place not in offer.misses]
        if not sent:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count, "lane")
        idle = self._idle.pop() if self._idle else None
        used = [] if idle is None else [idle]
        given_up = threading.Event()

        def opened(lane: Lane) -> None:
            used.append(lane)
            if given_up.is_set():
                lane.interrupt()

        intact: list[bool] = []
        buffers = [into[at] for at in sent]
        work = (idle, (self._host, self._port), _STALL_S, offer.token, buffers, offer.checksums, intact, opened)
        receiving = asyncio.get_running_loop().run_in_executor(self._threads, receive, *work)
        try:
            self._idle.append(await asyncio.shield(receiving))
        except asyncio.CancelledError:
            # The caller may use its buffers again once this returns.
            given_up.set()
            for lane in [*used]:
                lane.interrupt()
            (outcome,) = await asyncio.gather(receiving, return_exceptions=True)
            if isinstance(outcome, Lane):
                outcome.close()
            raise
        finally:
            for at, good in zip(sent, intact, strict=False):
                found[at] = good


def dialled_host(address: str) -> str | None:
    """The host of a gRPC address; None for a Unix socket, which has shared memory instead."""
    if address.startswith("unix:"):
        return None
    return address.rpartition(":")[0].strip("[]")
