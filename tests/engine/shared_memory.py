"""A cache service's memory as a client of its host sees it, for tests: ten slots, and no service."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Sequence

from katydid_cache import (
    NOT_WRITTEN,
    ArenaMapping,
    ArenaSlot,
    ArenaSlots,
    LookupResult,
    PrefetchResult,
    PutOutcome,
    PutRefusal,
    PutStatus,
    Reservation,
    TierRun,
)
from katydid_cache import Tier as CacheTier
from katydid_cache.arena_slots import SLOT
from katydid_kernels import linear_checksum, published_checksum
from xxhash import xxh3_128_digest

BLOCK = 3000
SLOT_BYTES = 4096
STORED = PutOutcome(PutStatus.STORED)


def name(block: int) -> bytes:
    return bytes([block]) * 32


def summed(block: int) -> int:
    return published_checksum(linear_checksum(bytes([block]) * BLOCK))


class SharedMemory:
    """A service's memory of ten slots, as a client sees it; block ``i`` lies in slot ``i`` once it is committed."""

    def __init__(self) -> None:
        self.attached = True
        self.arena: ArenaMapping | None = self._map()
        self.committed: dict[bytes, bytes] = {}
        self.given_up = 0
        self.on_disk: set[int] = set()
        self.summed: set[int] = set()
        self.reported: list[bytes] = []
        self.released: list[int] = []
        self.broken = False

    @property
    def in_place(self) -> SharedMemory:
        return self

    @staticmethod
    def _map() -> ArenaMapping:
        descriptor = os.memfd_create("test-arena")
        os.ftruncate(descriptor, 10 * SLOT_BYTES)
        try:
            return ArenaMapping(descriptor, 10 * SLOT_BYTES)
        finally:
            os.close(descriptor)

    async def lookup(self, hashes: bytes, *, before: bytes, trace: object) -> LookupResult:
        return self.found(len(hashes) // 32)

    async def release(self, lease: int) -> None:
        self.released.append(lease)

    def restart(self) -> None:
        self.arena = self._map()

    async def reserve(self, hashes: bytes, *, parents: bytes, tenant: bytes, hold_s: float | None) -> Reservation:
        await asyncio.sleep(0)
        if self.broken:
            raise RuntimeError("reserve")
        self._reserved = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        there = {index for index, one in enumerate(self._reserved) if one in self.committed}
        slots = tuple(
            None if index in there else ArenaSlot(one[0] * SLOT_BYTES, 1) for index, one in enumerate(self._reserved)
        )
        return Reservation(1, slots, {index: PutOutcome(PutStatus.PRESENT) for index in there})

    async def report(self, hashes: bytes) -> int:
        self.reported.append(hashes)
        return 1

    async def commit(self, reservation: Reservation, *, linear_checksums: Sequence[int]) -> list[PutOutcome]:
        outcomes = []
        slots = [slot for slot in reservation.slots if slot is not None]
        for slot, checksum in zip(slots, linear_checksums, strict=True):
            content = self.content(slot.offset // SLOT_BYTES)
            if checksum == published_checksum(linear_checksum(content)):
                self.committed[name(slot.offset // SLOT_BYTES)] = content
                outcomes.append(STORED)
            else:
                self.given_up += checksum == NOT_WRITTEN
                outcomes.append(PutOutcome(PutStatus.REFUSED, PutRefusal.CHECKSUM))
        return outcomes

    async def prefetch(self, hashes: bytes, *, deadline_s: float, wait: bool) -> PrefetchResult:
        assert wait
        blocks = list(hashes[::32])
        self.on_disk -= set(blocks)
        return PrefetchResult(len(blocks), 0.0, self.slots(blocks))

    def content(self, block: int) -> bytes:
        assert self.arena is not None
        return bytes(self.arena.view[block * SLOT_BYTES : block * SLOT_BYTES + BLOCK])

    def write(self, block: int) -> None:
        assert self.arena is not None
        self.arena.view[block * SLOT_BYTES : block * SLOT_BYTES + BLOCK] = bytes([block]) * BLOCK

    def slots(self, blocks: Sequence[int]) -> ArenaSlots:
        """Blocks in `summed` have a linear checksum beside the other."""
        checksums = (xxh3_128_digest(bytes([block]) * BLOCK) for block in blocks)
        linear = [summed(block) if block in self.summed else 0 for block in blocks]
        packed = b"".join(SLOT.pack(block * SLOT_BYTES, 1) for block in blocks)
        return ArenaSlots(packed, b"".join(checksums), struct.pack(f"<{len(linear)}Q", *linear))

    def found(self, count: int) -> LookupResult:
        """Blocks 0 to ``count``, the last of them on disk where they are."""
        near = [block for block in range(count) if block not in self.on_disk]
        runs = (TierRun(CacheTier.MEMORY, len(near), 0.0), TierRun(CacheTier.DISK, count - len(near), 0.1))
        return LookupResult(count, runs, 5, slots=self.slots(near))
