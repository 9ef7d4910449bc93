"""Whether the books of a store agree with each other; tests and operators ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from katydid_kvcache.blocks import Block
from katydid_kvcache.slabs import Slot
from katydid_kvcache.tier_books import TierBooks

if TYPE_CHECKING:
    from katydid_kvcache.store import Store

__all__ = ["check_store"]


def check_store(store: Store) -> None:
    """Raises AssertionError when index, slots, queues and counters disagree."""
    for books in store.tiers:
        _check_tier(store, books)
    shared = 0
    for namespace in store.namespaces.values():
        for block_hash, block in namespace.blocks.items():
            assert block.hash == block_hash
            assert block.present, "the index holds a block that is nowhere"
            assert not block.heads & block.writing, "heads are committed and being written"
            assert block.disk is None or block.complete, "half a block is on disk"
            assert block.memory is not None or block.complete, "half a block is in the shared store"
            assert bool(block.row) == (block.memory is not None and block.complete), "a lookup would overlook a block"
            shared += block.shared is not None
    if store.shared is not None:
        store.shared.check_integrity()
        assert store.shared.blocks == shared, f"{store.shared.blocks} shared blocks counted, {shared} there"


def _check_tier(store: Store, books: TierBooks) -> None:
    books.slots.check_integrity()
    held = sum(len(slab.owners) * slab.slot_bytes for _, slab in books.slots)
    assert held == books.pools.held.total(), f"{books.tier.name}: {held} bytes taken, others charged"
    owners = {id(owner): owner for _, slab in books.slots for _, owner in slab.owners.values()}

    def slot_of(block: Block) -> Slot | None:
        return block.memory if books is store.memory else block.disk

    placed = [block for namespace in store.namespaces.values() for block in namespace.blocks.values() if slot_of(block)]
    assert {id(block) for block in placed} <= set(owners), f"{books.tier.name}: a block's slot is not its own"
    visible = [block for block in placed if block.complete and block.checksum]
    assert books.blocks == len(visible), f"{books.tier.name}: {books.blocks} counted, {len(visible)} there"
    assert books.bytes == sum(block.namespace.layout.block_bytes for block in visible)
    for block in placed:
        slot = slot_of(block)
        assert slot is not None
        assert books.slots.holds(slot), f"{books.tier.name}: a block holds a slot that was given back"
        assert (block in books.order(block)) or block.parked, f"{books.tier.name}: a block can't be evicted"
        assert block.pins or not block.parked, "an unpinned block is parked"
