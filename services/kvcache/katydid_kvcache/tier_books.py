"""The books of one tier: its slots, whose they are, the order in which blocks would be evicted, and what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from katydid_cache.records import Tier

from katydid_kvcache.blocks import Block
from katydid_kvcache.policy.admission import new_admission
from katydid_kvcache.policy.eviction import Eviction, new_eviction
from katydid_kvcache.policy.ghosts import Ghosts
from katydid_kvcache.policy.pools import COMMON, Pools, TierPolicy
from katydid_kvcache.slabs import SlabAllocator, Slot

__all__ = ["TierBooks", "TierCounters"]

_STEAL_CANDIDATES = 16


@dataclass(slots=True)
class TierCounters:
    """Counts since the start; see TierStats in the protocol. `sheds` has the writes given up by reason."""

    hits: int = 0
    misses: int = 0
    writes: int = 0
    evictions: int = 0
    corrupt: int = 0
    sheds: Counter[str] = field(default_factory=Counter)

    @property
    def shed(self) -> int:
        """Writes given up, for whatever reason."""
        return self.sheds.total()


class TierBooks:
    """Slots, eviction order and counters of one tier, run by `policy`."""

    def __init__(
        self,
        tier: Tier,
        slots: SlabAllocator[Block],
        *,
        header_bytes: int = 0,
        policy: TierPolicy = TierPolicy(),
    ) -> None:
        self.tier = tier
        self.slots = slots
        self.header_bytes = header_bytes
        self.policy = policy
        self.counters = TierCounters()
        self.blocks = 0
        self.bytes = 0
        self.pools = Pools(policy)
        self.ghosts = Ghosts(slots.capacity_bytes)
        self._admits = new_admission(policy.admission, self.ghosts)
        self._order: dict[tuple[int, bytes], Eviction[Block]] = {}

    def slot_bytes(self, block: Block) -> int:
        return block.namespace.slot_bytes + self.header_bytes

    def admits(self, block: Block) -> bool:
        """Whether the block may displace others."""
        return self._admits(block.hash)

    def wants(self, block: Block) -> bool:
        """Whether there is room for the block, or it may displace others."""
        return self.slots.has_room(self.slot_bytes(block)) or self.admits(block)

    def order(self, block: Block) -> Eviction[Block]:
        """The eviction queue the block belongs to."""
        return self._queue(self.slot_bytes(block), self.pools.pool(block.tenant))

    def enqueue(self, block: Block) -> None:
        """Add the block to its eviction queue, unless it is there."""
        order = self.order(block)
        if block not in order:
            order.insert(block, self.slot_bytes(block), guest=block.guest)

    def allocate(self, block: Block) -> Slot | None:
        """A free slot for the block, counted as its tenant's; None when there is none or the tenant is at its limit."""
        size = self.slot_bytes(block)
        if self.pools.at_limit(block.tenant, size):
            return None
        slot = self.slots.allocate(size, block)
        if slot is not None:
            self.pools.charge(block.tenant, size)
        return slot

    def free(self, block: Block, slot: Slot) -> None:
        """Give the block's slot back."""
        self.slots.free(slot)
        self._refund(block)

    def withdraw(self, block: Block, slot: Slot) -> None:
        """Take the block's slot out of use for good."""
        self.slots.withdraw(slot)
        self._refund(block)

    def victim(self, block: Block) -> Block | None:
        """Take the block that is to go for `block` out of its queue; None when everything that may go is pinned.

        It is the next one of the tenant's own pool when that is at its limit, and otherwise, of the pools that hold
        more than is guaranteed to them, the one whose next block was used longest ago.
        """
        size, own = self.slot_bytes(block), self.pools.pool(block.tenant)
        donors = [] if self.pools.at_limit(block.tenant, size) else self.pools.donors(size)
        while donors:
            queues = {pool: queue for pool in donors if (queue := self._queue(size, pool))}
            if not queues:
                break
            pool = next(iter(queues))
            if len(queues) > 1:
                pool = min(queues, key=lambda pool: next(iter(queues[pool])).used_at)
            if (found := _unpinned(queues[pool])) is not None:
                return found
        return _unpinned(self._queue(size, own))

    def emptiable_slab(self, block: Block, slot_of: Callable[[Block], Slot | None]) -> list[Block] | None:
        """Owners of a slab of another slot size than the block's that may all go, or None.

        A slot size is entitled to an equal share of the slabs; only below it may it take from others.
        """
        slot_bytes = self.slot_bytes(block)
        sizes = self.slots.slot_sizes() | {slot_bytes}
        if len(sizes) == 1:
            return None
        if self.pools.at_limit(block.tenant, slot_bytes):
            return None
        if self.slots.slabs_of(slot_bytes) >= max(1, self.slots.total_slabs // len(sizes)):
            return None
        for (size, _), order in sorted(self._order.items(), key=lambda entry: -self.slots.slabs_of(entry[0][0])):
            if size == slot_bytes:
                continue
            for _, candidate in zip(range(_STEAL_CANDIDATES), order, strict=False):
                slot = slot_of(candidate)
                if slot is None or not self.slots.whole(slot.slab):
                    continue
                owners = self.slots.owners(slot.slab)
                if not any(owner.pins for owner in owners) and self._may_all_go(owners):
                    return owners
        return None

    def _may_all_go(self, owners: list[Block]) -> bool:
        """Whether no pool would be left with less than is guaranteed to it."""
        leaving: Counter[bytes] = Counter()
        for owner in owners:
            leaving[self.pools.pool(owner.tenant)] += self.slot_bytes(owner)
        return all(self.pools.spares(pool, size) for pool, size in leaving.items())

    def _refund(self, block: Block) -> None:
        self.pools.charge(block.tenant, -self.slot_bytes(block))
        if (pool := self.pools.pool(block.tenant)) != COMMON and not self.pools.used(block.tenant):
            self._order = {place: queue for place, queue in self._order.items() if place[1] != pool}

    def _queue(self, slot_bytes: int, pool: bytes) -> Eviction[Block]:
        queue = self._order.get((slot_bytes, pool))
        if queue is None:
            queue = self._order[slot_bytes, pool] = new_eviction(self.policy.eviction, lambda block: block.hash)
        return queue


def _unpinned(queue: Eviction[Block]) -> Block | None:
    """Take the next unpinned block out of a queue; pinned ones met are parked."""
    while (block := queue.pop()) is not None:
        if not block.pins:
            return block
        block.parked = True
    return None
