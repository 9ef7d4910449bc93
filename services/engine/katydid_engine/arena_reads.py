"""Blocks that workers unpack from where they lie in the cache service's memory, which this host's service shares.

A block whose linear checksum is known is checked by the workers as they unpack it; any other one by the face before
a worker hears of it. The face counts what workers have not unpacked yet: the lease must not end before, nor may the
memory's descriptor mean another one. How much may be on its way is limited, since a step takes all that has arrived.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from katydid_cache import ArenaMapping, ArenaSlot, Cache, LookupResult, Tier
from katydid_runtime.block_hash import HASH_BYTES
from xxhash import xxh3_128_digest

from katydid_engine.staging import arena_place, arena_slot

__all__ = ["ArenaReads", "Lying", "Window"]


# Of blocks that are to be brought up or checked first; others wait for no one.
_WINDOW_BLOCKS = 32


@dataclass(slots=True)
class Lying:
    """What a lookup found: the memory it is in, and for each block in order its slot, None while it is on disk; the
    first ``told`` of them have been told."""

    mapping: ArenaMapping
    slots: Sequence[ArenaSlot | None]
    told: int = 0


class Window(NamedTuple):
    """Slots of blocks and the linear checksum that each must have (0: it has been checked); ``read_s`` is the time it
    took to have them, beside waiting for workers."""

    slots: Sequence[int]
    checksums: Sequence[int]
    read_s: float


class ArenaReads:
    """Reads of one connector; at most ``limit`` blocks of ``block_bytes`` that workers have not unpacked yet."""

    def __init__(self, client: Cache, block_bytes: int, *, limit: int) -> None:
        self._client = client
        self._block_bytes = block_bytes
        self._limit = limit
        # Slots that workers were told of, by ticket; and the tickets of a slot, which may be read by several at once.
        self._told: Counter[int] = Counter()
        self._tickets: dict[int, list[int]] = {}
        self._mappings: dict[int, ArenaMapping] = {}
        self._freed = asyncio.Event()

    def found(self, found: LookupResult) -> Lying | None:
        """How to read what a lookup found in place; None when the service does not share its memory."""
        mapping = self._client.arena
        if mapping is None or not found.lease:
            return None
        return Lying(mapping, tuple(_by_block(found)))

    def reach(self, lying: Lying, most: int) -> int:
        """How many of the next ``most`` blocks one window is to have."""
        ahead = lying.slots[lying.told : lying.told + min(most, self._limit)]
        ready = sum(1 for _ in takewhile(lambda slot: slot is not None and slot.linear, ahead))
        return max(ready, min(_WINDOW_BLOCKS, len(ahead)))

    async def window(self, ticket: int, lying: Lying, hashes: bytes, timeout_s: float) -> Window:
        """The next blocks, whose hashes are given: as many as are there and not known to be wrong, in order."""
        wanted = lying.slots[lying.told : lying.told + len(hashes) // HASH_BYTES]
        lying.told += len(wanted)
        await self._room(len(wanted))
        started = time.monotonic()
        slots = [slot for slot in wanted if slot is not None]
        if len(slots) < len(wanted):
            fetched = await self._client.prefetch(hashes, deadline_s=timeout_s, wait=True)
            slots = [*fetched.slots]
        if self._client.arena is not lying.mapping:
            return Window((), (), 0.0)  # the service has been restarted meanwhile
        if not all(slot.linear for slot in slots):
            right = await asyncio.to_thread(self._count_right, lying.mapping, slots)
            if right < len(slots):
                await self._client.report(hashes[HASH_BYTES * right : HASH_BYTES * (right + 1)])
            slots = slots[:right]
        numbers = tuple(arena_slot(lying.mapping.descriptor, slot.offset) for slot in slots)
        for number in numbers:
            self._tickets.setdefault(number, []).append(ticket)
        self._told[ticket] += len(numbers)
        self._mappings[ticket] = lying.mapping
        return Window(numbers, tuple(slot.linear for slot in slots), time.monotonic() - started)

    def unpacked(self, slots: Sequence[int]) -> list[int]:
        """Workers are done with these; those that are none of the service's memory are left."""
        left = []
        for slot in slots:
            if arena_place(slot) is None:
                left.append(slot)
                continue
            tickets = self._tickets[slot]
            self._told[tickets.pop(0)] -= 1
            if not tickets:
                del self._tickets[slot]
        self._freed.set()
        return left

    async def all_unpacked(self, ticket: int) -> None:
        """Wait until workers are done with all blocks of a ticket."""
        await self._until(lambda: not self._told[ticket])
        del self._told[ticket]
        self._mappings.pop(ticket, None)

    async def _room(self, wanted: int) -> None:
        await self._until(lambda: not self._told.total() or self._told.total() + wanted <= self._limit)

    async def _until(self, met: Callable[[], bool]) -> None:
        while not met():
            self._freed.clear()
            await self._freed.wait()

    def _count_right(self, mapping: ArenaMapping, slots: Sequence[ArenaSlot]) -> int:
        """How many hold what was committed, or are left to the workers to check, from the first one on."""
        for count, slot in enumerate(slots):
            block = mapping.view[slot.offset : slot.offset + self._block_bytes]
            if not slot.linear and xxh3_128_digest(block) != slot.checksum:
                return count
        return len(slots)


def _by_block(found: LookupResult) -> Iterator[ArenaSlot | None]:
    slots = iter(found.slots)
    for run in found.runs:
        for _ in range(run.blocks):
            yield next(slots) if run.tier is Tier.MEMORY else None
