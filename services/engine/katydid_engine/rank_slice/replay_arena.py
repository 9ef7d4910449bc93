"""The cache service of a replay: it has every block that was computed, in memory that a GPU reads and writes for real.

Objects of a whole model are large, so few lie there, and blocks take them in turn: the bytes that move are as many as
they would be, and what they say nobody asks, here as in the pages of a slice.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable

from katydid_runtime.block_hash import split_hashes

from katydid_engine.messages import KvArrived, KvAsk, KvFound, KvGranted, KvLookup, KvReserve, KvStore
from katydid_engine.request import Tier
from katydid_engine.scheduler import Scheduler
from katydid_engine.staging import ARENA_PAGE_BYTES, arena_slot

__all__ = ["ReplayArena"]


class ReplayArena:
    """Room for ``objects`` of ``object_bytes`` each; its memory takes none before it is touched."""

    def __init__(self, object_bytes: int, objects: int = 256) -> None:
        stride = -(-object_bytes // ARENA_PAGE_BYTES) * ARENA_PAGE_BYTES
        self._descriptor = os.memfd_create("katydid-replay")
        os.ftruncate(self._descriptor, objects * stride)
        self._slots = itertools.cycle([arena_slot(self._descriptor, place * stride) for place in range(objects)])
        self._stored: set[bytes] = set()
        self.read = self.written = 0

    def attach(self, scheduler: Scheduler) -> None:
        scheduler.kv.set_attached(True, in_place=True)

    def answer(self, scheduler: Scheduler, asks: Iterable[KvAsk]) -> None:
        """Each at once; of a lookup all blocks that it finds."""
        for ask in asks:
            if isinstance(ask, KvLookup):
                hashes = split_hashes(ask.hashes)
                found = next((at for at, one in enumerate(hashes) if one not in self._stored), len(hashes))
                scheduler.kv_found(KvFound(ask.ticket, ((Tier.MEMORY, found),) if found else ()))
                if found:
                    slots = tuple(itertools.islice(self._slots, found))
                    scheduler.kv_arrived(KvArrived(ask.ticket, slots, last=True))
                    self.read += found
            elif isinstance(ask, KvReserve):
                slot = None if ask.hash in self._stored else next(self._slots)
                scheduler.kv.granted(KvGranted((ask.hash,), (slot,)))
            elif isinstance(ask, KvStore):
                self._stored.add(ask.hash)
                self.written += 1

    def close(self) -> None:
        os.close(self._descriptor)
