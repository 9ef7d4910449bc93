"""Packs and unpacks that steps began and that are not over: of which blocks, and the pages that stay with them. Pure.

A page that a transfer reads or writes is not given away before it is over, whatever becomes of the sequence it belonged
to: each transfer has a reference of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from katydid_engine.block_pool import BlockPool
from katydid_engine.kv_traffic import Arrival
from katydid_engine.messages import KvStore
from katydid_engine.plan import Moved, StepPlan, Transfer

__all__ = ["Moves"]


class Moves:
    """Of one scheduler, over its pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._packing: dict[int, tuple[tuple[Transfer, ...], tuple[KvStore, ...]]] = {}
        self._unpacking: dict[int, tuple[tuple[Transfer, ...], tuple[Arrival, ...]]] = {}

    def __bool__(self) -> bool:
        return bool(self._packing or self._unpacking)

    def begin(self, plan: StepPlan, packing: tuple[KvStore, ...], unpacking: tuple[Arrival, ...]) -> None:
        """A step is planned that moves these blocks."""
        if plan.packs:
            self._packing[plan.number] = plan.packs, packing
        if plan.unpacks:
            self._unpacking[plan.number] = plan.unpacks, unpacking
        elif unpacking:
            # Ends of tickets without a block of their own, whose blocks are on their way.
            step, (transfers, arrivals) = self._unpacking.popitem()
            self._unpacking[step] = transfers, (*arrivals, *unpacking)
        self._pool.acquire([transfer.page for transfer in (*plan.packs, *plan.unpacks)])

    def packed(self, moved: Moved) -> Iterator[tuple[KvStore, int]]:
        """Blocks that lie in their slots now, each with its checksum."""
        transfers, stores = self._packing.pop(moved.step)
        self._release(transfers)
        return zip(stores, moved.checksums, strict=True)

    def unpacked(self, moved: Moved) -> Iterator[tuple[Arrival, tuple[int, ...]]]:
        """Blocks that lie in their pages now, each arrival with the checksums that were found."""
        transfers, arrivals = self._unpacking.pop(moved.step)
        self._release(transfers)
        first = 0
        for arrival in arrivals:
            end = first + len(arrival.transfers)
            yield arrival, moved.checksums[first:end]
            first = end

    def arrivals(self) -> Iterator[Arrival]:
        """Whose blocks are being unpacked."""
        return itertools.chain.from_iterable(arrivals for _, arrivals in self._unpacking.values())

    def pages(self) -> list[int]:
        """Every page that a transfer holds, as often as it does."""
        under_way = (*self._packing.values(), *self._unpacking.values())
        return [transfer.page for transfers, _ in under_way for transfer in transfers]

    def _release(self, transfers: Sequence[Transfer]) -> None:
        self._pool.release([transfer.page for transfer in transfers])
