"""The books of one tier: its slots, the order in which blocks would be evicted, and what is counted for operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from katydid_cache.records import Tier

from katydid_kvcache.blocks import Block
from katydid_kvcache.eviction import Lru
from katydid_kvcache.slabs import SlabAllocator, Slot

__all__ = ["TierBooks", "TierCounters"]

_STEAL_CANDIDATES = 16


@dataclass(slots=True)
class TierCounters:
    """Counts since the start; see TierStats in the protocol."""

    hits: int = 0
    misses: int = 0
    writes: int = 0
    evictions: int = 0
    corrupt: int = 0
    shed: int = 0


class TierBooks:
    """Slots, eviction order and counters of one tier."""

    def __init__(self, tier: Tier, slots: SlabAllocator[Block], *, header_bytes: int = 0) -> None:
        self.tier = tier
        self.slots = slots
        self.header_bytes = header_bytes
        self.counters = TierCounters()
        self.blocks = 0
        self.bytes = 0
        self._order: dict[int, Lru[Block]] = {}

    def slot_bytes(self, block: Block) -> int:
        return block.namespace.slot_bytes + self.header_bytes

    def order(self, block: Block) -> Lru[Block]:
        """The eviction queue the block belongs to."""
        return self._order.setdefault(self.slot_bytes(block), Lru())

    def coldest(self, slot_bytes: int) -> Block | None:
        """Take the coldest unpinned block of a slot size out of its queue; pinned ones met are parked."""
        order = self._order.setdefault(slot_bytes, Lru())
        while (block := order.pop()) is not None:
            if not block.pins:
                return block
            block.parked = True
        return None

    def emptiable_slab(self, slot_bytes: int, slot_of: Callable[[Block], Slot | None]) -> list[Block] | None:
        """Owners of a slab of another slot size that may all go, or None.

        A slot size is entitled to an equal share of the slabs; only below it may it take from others.
        """
        sizes = self.slots.slot_sizes() | {slot_bytes}
        if len(self.slots.slabs_of(slot_bytes)) >= max(1, self.slots.total_slabs // len(sizes)):
            return None
        for size in sorted(sizes - {slot_bytes}, key=lambda size: -len(self.slots.slabs_of(size))):
            for _, block in zip(range(_STEAL_CANDIDATES), self._order.get(size, ()), strict=False):
                slot = slot_of(block)
                if slot is None or not self.slots.whole(slot.slab):
                    continue
                owners = self.slots.owners(slot.slab)
                if not any(owner.pins for owner in owners):
                    return owners
        return None
