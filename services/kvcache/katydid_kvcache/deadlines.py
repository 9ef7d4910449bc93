"""Blocks in order of the time at which they end; a block's time may move on while it waits."""

from __future__ import annotations

import heapq
import itertools

from katydid_kvcache.blocks import Block

__all__ = ["Deadlines"]

_SWEEP = 1024


class Deadlines:
    """A queue of blocks that have an `expires_at`."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Block]] = []
        self._tie = itertools.count()
        self._sweep_at = _SWEEP

    def add(self, block: Block) -> None:
        """Remember a block, unless it never ends."""
        if not block.expires_at:
            return
        heapq.heappush(self._queue, (block.expires_at, next(self._tie), block))
        # Evicted blocks leave their entry behind; sweep when there are twice as many entries as were left last time.
        if len(self._queue) >= self._sweep_at:
            self._queue = [entry for entry in self._queue if entry[2].present]
            heapq.heapify(self._queue)
            self._sweep_at = max(_SWEEP, 2 * len(self._queue))

    def passed(self, now: float) -> bool:
        """Whether any block was to end by now when it was added."""
        return bool(self._queue) and self._queue[0][0] <= now

    def due(self, now: float) -> list[Block]:
        """Take out the blocks that were to end by now when they were added."""
        blocks = []
        while self._queue and self._queue[0][0] <= now:
            blocks.append(heapq.heappop(self._queue)[2])
        return blocks
