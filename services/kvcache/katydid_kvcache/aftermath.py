"""What calls leave to be done after their answer: ghosts, order of eviction, lower tiers, figures.

A lookup of thousands of blocks must not wait for its own bookkeeping, nor must anything else: the work is cut into
small steps, and takes a tenth of the loop's time at most. When more is left to do than that, some lookups go by unseen.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from katydid_cache.records import TierRun

from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.store import Store
from katydid_kvcache.tenants import Tenants

__all__ = ["Aftermath"]

logger = logging.getLogger(__name__)

_STEP_BLOCKS = 32
_MOST_BLOCKS = 65_536
_SHARE = 0.1
_TURN_S = 0.0002


class Aftermath:
    """Work in order of the calls that left it, done by a task of its own while there is some.

    `sink` is called with every block found, which may go to a lower tier now, and says whether that took some time.
    """

    def __init__(self, store: Store, sink: Callable[[Block], bool], tenants: Tenants) -> None:
        self._store = store
        self._sink = sink
        self._tenants = tenants
        self._work: deque[tuple[int, Iterator[None]]] = deque()
        self._waiting = 0
        self._doing: asyncio.Task[None] | None = None

    def of_lookup(
        self,
        namespace: Namespace,
        names: Sequence[bytes],
        tenant: bytes,
        runs: Sequence[TierRun],
        found: Sequence[Block],
    ) -> None:
        """A lookup of `names` found `found`."""
        self._tenants.count_lookup(namespace, tenant, len(names), runs)
        self._add(len(names), self._lookup_steps(namespace, names, tenant, found))

    def of_write(self, namespace: Namespace, last: bytes) -> None:
        """A chain was written that ends with the block `last`."""
        self._add(1, self._write_steps(namespace, last))

    async def done(self) -> None:
        """Wait until nothing is left."""
        if self._doing is not None:
            await asyncio.shield(self._doing)

    def close(self) -> None:
        """Leave undone what is left."""
        self._work.clear()
        self._waiting = 0
        if self._doing is not None:
            self._doing.cancel()

    def _add(self, blocks: int, steps: Iterator[None]) -> None:
        if self._waiting + blocks > _MOST_BLOCKS:
            return
        self._work.append((blocks, steps))
        self._waiting += blocks
        if self._doing is None:
            self._doing = asyncio.create_task(self._do())

    async def _do(self) -> None:
        spent_s = 0.0
        try:
            while self._work:
                blocks, steps = self._work.popleft()
                self._waiting -= blocks
                started = time.perf_counter()
                for _ in steps:
                    spent_s += time.perf_counter() - started
                    if spent_s >= _TURN_S:
                        await asyncio.sleep(spent_s * (1 / _SHARE - 1))
                        spent_s = 0.0
                    started = time.perf_counter()
                spent_s += time.perf_counter() - started
        except Exception:
            logger.exception("bookkeeping failed")  # what is left is done at the next call
        finally:
            self._doing = None

    def _lookup_steps(
        self,
        namespace: Namespace,
        names: Sequence[bytes],
        tenant: bytes,
        found: Sequence[Block],
    ) -> Iterator[None]:
        for books in self._store.tiers:
            yield from books.ghosts.observe_steps(names, namespace.slot_bytes + books.header_bytes)
        shared = 0
        for start in range(0, len(found), _STEP_BLOCKS):
            yield
            for block in found[start : start + _STEP_BLOCKS]:
                shared += block.tenant != tenant
                if self._sink(block):
                    yield
        self._tenants.of(tenant).shared_hits += shared

    def _write_steps(self, namespace: Namespace, last: bytes) -> Iterator[None]:
        yield
        self._store.settle(namespace, last)
