"""What calls leave to be done after their answer: ghosts, order of eviction, lower tiers, figures.

A lookup of thousands of blocks must not wait for its own bookkeeping, nor must the next one: the work is cut into
slices of some 50 microseconds, and other work of the loop goes on in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from katydid_cache.records import TierRun

from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.store import Store
from katydid_kvcache.tenants import Tenants

__all__ = ["Aftermath"]

logger = logging.getLogger(__name__)

_SLICE = 64
_BACKLOG = 1024


class Aftermath:
    """Work in order of the calls that left it, done by a task of its own. Beyond 1,024 calls the oldest are let go.

    `sink` is called with every block found: it may go to a lower tier now.
    """

    def __init__(self, store: Store, sink: Callable[[Block], None], tenants: Tenants) -> None:
        self._store = store
        self._sink = sink
        self._tenants = tenants
        self._work: deque[Iterator[None]] = deque(maxlen=_BACKLOG)
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
        self._add(self._lookup_steps(namespace, names, tenant, runs, found))

    def of_write(self, namespace: Namespace, last: bytes) -> None:
        """A chain was written that ends with the block `last`."""
        self._add(self._write_steps(namespace, last))

    async def done(self) -> None:
        """Wait until nothing is left."""
        if self._doing is not None:
            await asyncio.shield(self._doing)

    def close(self) -> None:
        """Leave undone what is left."""
        self._work.clear()
        if self._doing is not None:
            self._doing.cancel()

    def _add(self, steps: Iterator[None]) -> None:
        self._work.append(steps)
        if self._doing is None:
            self._doing = asyncio.create_task(self._do())

    async def _do(self) -> None:
        try:
            while self._work:
                for _ in self._work.popleft():
                    await asyncio.sleep(0)
        except Exception:
            logger.exception("bookkeeping failed")  # what is left is done at the next call
        finally:
            self._doing = None

    def _lookup_steps(
        self,
        namespace: Namespace,
        names: Sequence[bytes],
        tenant: bytes,
        runs: Sequence[TierRun],
        found: Sequence[Block],
    ) -> Iterator[None]:
        for books in self._store.tiers:
            yield from books.ghosts.observe_steps(names, namespace.slot_bytes + books.header_bytes)
        for start in range(0, len(found), _SLICE):
            yield
            for block in found[start : start + _SLICE]:
                self._sink(block)
        self._tenants.count_lookup(namespace, tenant, len(names), runs, found)

    def _write_steps(self, namespace: Namespace, last: bytes) -> Iterator[None]:
        yield
        self._store.settle(namespace, last)
