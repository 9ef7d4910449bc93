"""Blocks that workers pack straight into the cache service's memory, which this host's service shares.

Finished blocks are reserved in batches, packed by the next step into the slots granted, and committed with the linear
checksums that were made of them on the way. Blocks the service has already are never packed at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from katydid_cache import NOT_WRITTEN, ArenaMapping, Cache, InPlace, PutOutcome, Reservation

from katydid_engine.engine_metrics import EngineMetrics
from katydid_engine.messages import KvGranted, KvReserve, ToWorker
from katydid_engine.staging import arena_slot

__all__ = ["ArenaWrites"]

_BATCH_BLOCKS = 32

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Batch:
    """One reservation: the numbers of its slots in order, and the checksums of those packed or given up. The memory's
    descriptor is kept open by it, so that the numbers mean no other memory."""

    mapping: ArenaMapping
    reservation: Reservation
    in_place: InPlace
    slots: list[int]
    checksums: dict[int, int] = field(default_factory=dict)


class ArenaWrites:
    """Writes of one connector."""

    def __init__(self, client: Cache, send: Callable[[ToWorker], None], metrics: EngineMetrics) -> None:
        self._client = client
        self._send = send
        self._metrics = metrics
        self._wanted: asyncio.Queue[KvReserve] = asyncio.Queue()
        self._batches: dict[int, _Batch] = {}
        self._commits: set[asyncio.Task[None]] = set()

    @property
    def possible(self) -> bool:
        """Whether blocks can be packed into the service's memory now."""
        return self._client.in_place is not None and self._client.arena is not None

    def reserve(self, ask: KvReserve) -> None:
        """Takes a block that waits; it is answered by KvGranted, whatever happens."""
        self._wanted.put_nowait(ask)

    def settle(self, slot: int, checksum: int) -> None:
        """A granted slot holds a block of this linear checksum now, or with NOT_WRITTEN never will."""
        batch = self._batches.pop(slot)
        batch.checksums[slot] = checksum
        if len(batch.checksums) == len(batch.slots):
            task = asyncio.create_task(self._commit(batch))
            self._commits.add(task)
            task.add_done_callback(self._commits.discard)

    async def run(self) -> None:
        """Reserves what is wanted, until cancelled."""
        while True:
            asks = [await self._wanted.get()]
            while len(asks) < _BATCH_BLOCKS and not self._wanted.empty():
                asks.append(self._wanted.get_nowait())
            alike: dict[tuple[bytes, float | None], list[KvReserve]] = {}
            for ask in asks:
                alike.setdefault((ask.tenant, ask.hold_s), []).append(ask)
            for group in alike.values():
                await self._grant(group)

    async def _grant(self, group: Sequence[KvReserve]) -> None:
        slots: list[int | None] = [None] * len(group)
        in_place, mapping = self._client.in_place, self._client.arena
        try:
            if in_place is not None and mapping is not None:
                slots = await self._slots(group, in_place, mapping)
        except Exception:
            logger.exception("no slots for finished blocks", extra={"blocks": len(group)})
        self._send(KvGranted(tuple(ask.hash for ask in group), tuple(slots)))

    async def _slots(self, group: Sequence[KvReserve], in_place: InPlace, mapping: ArenaMapping) -> list[int | None]:
        reservation = await in_place.reserve(
            b"".join(ask.hash for ask in group),
            parents=b"".join(ask.parent or bytes(len(ask.hash)) for ask in group),
            tenant=group[0].tenant,
            hold_s=group[0].hold_s,
        )
        for outcome in reservation.declined.values():
            self._count(outcome)
        numbers = [None if slot is None else arena_slot(mapping.descriptor, slot.offset) for slot in reservation.slots]
        if self._client.arena is not mapping:
            return [None] * len(group)  # restarted meanwhile: what was reserved is gone, or goes with the attachment
        batch = _Batch(mapping, reservation, in_place, [number for number in numbers if number is not None])
        self._batches.update(dict.fromkeys(batch.slots, batch))
        return numbers

    async def _commit(self, batch: _Batch) -> None:
        try:
            checksums = [batch.checksums[slot] for slot in batch.slots]
            outcomes = await batch.in_place.commit(batch.reservation, linear_checksums=checksums)
            for checksum, outcome in zip(checksums, outcomes, strict=True):
                if checksum != NOT_WRITTEN:
                    self._count(outcome)
        except Exception:
            logger.exception("write-back failed", extra={"blocks": len(batch.slots)})

    def _count(self, outcome: PutOutcome) -> None:
        what = outcome.status if outcome.refusal is None else outcome.refusal
        self._metrics.kv_stored.labels(what.name.lower()).inc()
