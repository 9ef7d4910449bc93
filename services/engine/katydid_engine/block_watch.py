"""Block events of all ranks for any number of watchers: a snapshot first, then deltas in order, without a gap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.errors import OverloadedError

from katydid_engine.block_pool import BlockEvents

__all__ = ["BlockWatch"]

_SNAPSHOT_HASHES = 16_384
_QUEUE_EVENTS = 10_000


class BlockWatch:
    """Mirrors which blocks each rank holds. A watcher that falls too far behind is cut off and starts over."""

    def __init__(self, boot_id: str, dp_ranks: int) -> None:
        self._boot_id = boot_id
        self._held: list[dict[bytes, None]] = [{} for _ in range(dp_ranks)]
        self._watchers: set[asyncio.Queue[pb.BlockDelta]] = set()

    def apply(self, dp_rank: int, events: BlockEvents) -> None:
        held = self._held[dp_rank]
        for block_hash in events.removed:
            held.pop(block_hash, None)
        held.update(dict.fromkeys(events.stored))
        if self._watchers:
            delta = pb.BlockDelta(dp_rank=dp_rank, stored=b"".join(events.stored), removed=b"".join(events.removed))
            for queue in self._watchers:
                if queue.qsize() <= _QUEUE_EVENTS:
                    queue.put_nowait(delta)

    async def stream(self) -> AsyncIterator[pb.WatchResponse]:
        """Raises OverloadedError when the watcher reads too slowly."""
        queue: asyncio.Queue[pb.BlockDelta] = asyncio.Queue()
        # Copied before the first await, so that the deltas queued from now on follow it exactly.
        parts = self._snapshot()
        self._watchers.add(queue)
        try:
            sequence = 0
            for part in parts:
                sequence += 1
                yield pb.WatchResponse(boot_id=self._boot_id, sequence=sequence, snapshot=part)
            while True:
                delta = await queue.get()
                if queue.qsize() >= _QUEUE_EVENTS:
                    raise OverloadedError("the watcher reads block events too slowly; watch again")
                sequence += 1
                yield pb.WatchResponse(boot_id=self._boot_id, sequence=sequence, delta=delta)
        finally:
            self._watchers.discard(queue)

    def _snapshot(self) -> list[pb.BlockSnapshot]:
        parts: list[pb.BlockSnapshot] = []
        for dp_rank, held in enumerate(self._held):
            hashes = list(held)
            parts += [
                pb.BlockSnapshot(dp_rank=dp_rank, hashes=b"".join(hashes[first : first + _SNAPSHOT_HASHES]))
                for first in range(0, max(1, len(hashes)), _SNAPSHOT_HASHES)
            ]
        parts[-1].last = True
        return parts
