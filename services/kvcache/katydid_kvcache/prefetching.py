"""Brings blocks up into memory before they are asked for: in order, some at a time, and not beyond a deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.read_speeds import ReadSpeeds
from katydid_kvcache.reading import Reader
from katydid_kvcache.store import Store
from katydid_kvcache.tier_runs import eta_s, tier_of

__all__ = ["Prefetching"]

_AT_A_TIME = 4


class Prefetching:
    """Prefetches of clients, by attachment: they end with it. A read once begun is finished, and its block stays."""

    def __init__(self, store: Store, reader: Reader, speeds: ReadSpeeds) -> None:
        self._store = store
        self._reader = reader
        self._speeds = speeds
        self._tasks: dict[asyncio.Task[None], int] = {}

    def start(self, owner: int, namespace: Namespace, names: Sequence[bytes], deadline_s: float) -> tuple[int, float]:
        """Begin to bring blocks up; how many are or will be in memory, and the expected time until all are."""
        found = self._found(namespace, names)
        wanted = [block for block in found if block is not None]
        below = [block for block in wanted if block.memory is None]
        if below:
            task = asyncio.create_task(self._promote(below, deadline_s))
            self._tasks[task] = owner
            task.add_done_callback(self._tasks.pop)
        return len(wanted), eta_s(self._speeds, namespace, Counter(map(tier_of, below)))

    async def fetch(self, namespace: Namespace, names: Sequence[bytes], deadline_s: float) -> list[Block]:
        """Bring blocks up until all are there or the time is up; those in memory, from the first on, without a gap."""
        found = self._found(namespace, names)
        await self._promote([block for block in found if block is not None and block.memory is None], deadline_s)
        there = takewhile(lambda block: block is not None and block.memory is not None, found)
        return [block for block in there if block is not None]

    def drop_owner(self, owner: int) -> None:
        """An attachment has gone: nothing more is begun for it."""
        for task, of in self._tasks.items():
            if of == owner:
                task.cancel()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _found(self, namespace: Namespace, names: Sequence[bytes]) -> list[Block | None]:
        return [self._store.find(namespace, name, namespace.all_heads) for name in names]

    async def _promote(self, blocks: Sequence[Block], deadline_s: float) -> None:
        waiting = iter(blocks)

        async def promote() -> None:
            for block in waiting:
                if block.present:
                    await self._reader.promote(block)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(*(promote() for _ in range(_AT_A_TIME)))
