"""What a store does where rules meet: times just up, tenants at their limits, slabs that may not be emptied."""

from __future__ import annotations

from collections.abc import Mapping

from katydid_cache.layout import BlockLayout, Span
from katydid_cache.records import PutRefusal
from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.deadlines import Deadlines
from katydid_kvcache.policy.pools import Quota, TierPolicy
from katydid_kvcache.shared.manifest import Entry, Location
from katydid_kvcache.slabs import SlabAllocator
from katydid_kvcache.store import Refusal, Store, Write

from tests.kvcache.test_store import ALL, HIGH, LARGE, LOW, OTHER, PAGE, SMALL, TENANT, make_store, write

MIDDLE = BlockLayout(layers=2, kv_heads=2, head_dim=16, dtype="float8_e4m3fn")
A, B, C = (bytes([number]) * 32 for number in b"abc")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def name(number: int) -> bytes:
    return bytes([number]) * 32


def deep_store(clock: Clock | None = None) -> tuple[Store, Namespace]:
    """A store of three tiers."""
    store = Store(
        SlabAllocator(2, 8 * PAGE),
        SlabAllocator(2, 16 * PAGE),
        disk_header_bytes=PAGE,
        shared_blocks=8,
        changed=lambda _: None,
        now=clock or Clock(),
    )
    return store, store.namespace(A, SMALL)


def put(store: Store, space: Namespace, number: int, heads: Span = ALL, expires_at: float = 0.0) -> Block:
    begun = store.begin_write(space, name(number), b"", heads)
    assert isinstance(begun, Write)
    if store.finish_write(begun, b"part"):
        store.complete(begun, b"whole", expires_at)
    store.unpin([begun.block])
    return begun.block


def adopt(store: Store, space: Namespace, number: int, expires_at: float = 0.0) -> Block | None:
    where = Location("pack", 0, b"shared", 7)
    store.adopt(space, Entry(name(number), b"", TENANT, expires_at, 0.0, where))
    return space.blocks.get(name(number))


def quotas(**of: Quota) -> Mapping[bytes, Quota]:
    return {{"tenant": TENANT, "other": OTHER}[who]: quota for who, quota in of.items()}


def test_every_tier_counts_what_it_and_those_above_have_not() -> None:
    store, space = deep_store()
    put(store, space, 1)
    below = put(store, space, 2)
    assert store.disk is not None
    assert store.shared is not None
    slot = store.room(store.disk, below)
    assert slot is not None
    store.place(store.disk, below, slot)
    store.leave(store.memory, below)
    adopt(store, space, 3)
    found = store.prefix(space, [name(number) for number in (1, 2, 3, 4)], space.all_heads)
    assert len(found.blocks) == 3
    counted = {books.tier.name: (books.counters.hits, books.counters.misses) for books in (*store.tiers, store.shared)}
    assert counted == {"MEMORY": (1, 3), "DISK": (1, 2), "SHARED": (1, 1)}


def test_a_block_whose_time_is_just_up_is_gone_though_somebody_reads_it() -> None:
    clock = Clock()
    store, space = deep_store(clock)
    block = put(store, space, 1, expires_at=1005.0)
    store.pin([block])
    clock.now = 1004.9
    assert store.prefix(space, [name(1)], space.all_heads).blocks == [block]
    clock.now = 1005.0
    store.expire()
    assert block.present, "whoever reads it goes on"
    assert store.prefix(space, [name(1)], space.all_heads).blocks == []
    assert store.find(space, name(1), space.all_heads) is None
    assert store.begin_write(space, name(1), b"", ALL) == Refusal(refusal=PutRefusal.BUSY)
    store.unpin([block])
    assert isinstance(store.begin_write(space, name(1), b"", ALL), Write)
    assert not block.present


def test_what_has_ended_in_the_shared_store_is_not_adopted() -> None:
    store, space = deep_store()
    assert adopt(store, space, 1, expires_at=1000.0) is None
    assert adopt(store, space, 2, expires_at=1000.1) is not None


def test_another_split_of_the_heads_starts_anew() -> None:
    store, space = deep_store()
    half = put(store, space, 1, LOW)
    whole = store.begin_write(space, name(1), b"", ALL)
    assert isinstance(whole, Write)
    assert whole.block is not half
    assert store.begin_write(space, name(1), b"", HIGH) == Refusal(refusal=PutRefusal.BUSY)


def test_half_a_block_written_over_a_shared_one_leaves_nothing_of_itself() -> None:
    store, space = deep_store()
    block = adopt(store, space, 1)
    assert put(store, space, 1, LOW) is block
    assert block is not None
    assert not block.complete
    store.leave(store.memory, block)
    assert (block.complete, block.parts, block.checksum, block.linear) == (True, {}, b"shared", 7)
    store.check_integrity()


def test_who_writes_over_a_shared_block_pays_for_it() -> None:
    store, space = deep_store()
    block = adopt(store, space, 1)
    assert block is not None
    assert block.tenant == TENANT
    begun = store.begin_write(space, name(1), b"", ALL, OTHER)
    assert isinstance(begun, Write)
    assert store.memory.pools.held == {OTHER: PAGE}
    assert block.tenant == OTHER


def test_a_chain_that_was_not_admitted_goes_first_though_it_was_settled() -> None:
    store = make_store(1, TierPolicy(admission="second_touch"))
    blocks = [write(store, A, SMALL, number) for number in range(8)]
    store.touch(blocks)
    guest = write(store, A, SMALL, 20)
    store.settle(guest.namespace, guest.hash)
    write(store, A, SMALL, 21)
    assert not guest.present
    assert sum(block.present for block in blocks) == 7


def test_a_tenant_at_its_limit_takes_from_nobody_else() -> None:
    store = make_store(1, TierPolicy(quotas=quotas(tenant=Quota(limit_bytes=2 * PAGE))))
    others = [write(store, A, SMALL, number) for number in range(6)]
    mine = [write(store, A, SMALL, number, TENANT) for number in range(10, 13)]
    assert [block.present for block in mine] == [False, True, True]
    assert all(block.present for block in others)


def test_a_block_too_large_for_its_tenant_empties_no_slab() -> None:
    store = make_store(1, TierPolicy(quotas=quotas(other=Quota(limit_bytes=4 * PAGE))))
    blocks = [write(store, A, SMALL, number) for number in range(8)]
    refused = store.begin_write(store.namespace(B, LARGE), name(1), b"", ALL, OTHER)
    assert refused == Refusal(refusal=PutRefusal.QUOTA)
    assert all(block.present for block in blocks)


def test_no_slab_is_emptied_below_what_a_tenant_is_guaranteed() -> None:
    store = make_store(1, TierPolicy(quotas=quotas(tenant=Quota(guaranteed_bytes=6 * PAGE))))
    blocks = [write(store, A, SMALL, number, TENANT) for number in range(8)]
    refused = store.begin_write(store.namespace(B, LARGE), name(1), b"", ALL)
    assert refused == Refusal(refusal=PutRefusal.NO_ROOM)
    assert all(block.present for block in blocks)


def test_a_slab_with_a_bad_slot_is_not_emptied_for_nothing() -> None:
    store = make_store(2)
    blocks = [write(store, A, SMALL, number) for number in range(16)]
    store.leave(store.memory, blocks[0], corrupt=True)
    assert write(store, B, LARGE, 1).present
    assert [block.present for block in blocks] == [False, *[True] * 7, *[False] * 8]


def test_a_slab_is_taken_from_those_who_have_most() -> None:
    store = make_store(4)
    few = [write(store, B, MIDDLE, number) for number in range(4)]
    many = [write(store, A, SMALL, number) for number in range(24)]
    assert write(store, C, LARGE, 1).present
    assert all(block.present for block in few)
    assert sum(block.present for block in many) == 16


def test_a_tier_wants_what_it_has_room_for_and_else_what_it_admits() -> None:
    store = make_store(1, TierPolicy(admission="second_touch"))
    books = store.memory
    stranger = Block(store.namespace(A, SMALL), name(99), b"")
    assert books.wants(stranger)
    for number in range(8):
        write(store, A, SMALL, number)
    assert not books.wants(stranger)
    for _ in range(2):
        books.ghosts.observe([stranger.hash], PAGE)
    assert books.wants(stranger)


def test_tenants_that_have_gone_leave_no_queue_behind() -> None:
    store = make_store(1, TierPolicy(each=Quota(limit_bytes=8 * PAGE)))
    for number in range(100):
        write(store, A, SMALL, number, bytes([number]) * 16)
    assert len(store.memory._order) <= 9


def test_blocks_that_have_gone_are_swept_from_the_deadlines() -> None:
    _, space = deep_store()
    deadlines = Deadlines()
    kept = []
    for number in range(10_000):
        block = Block(space, number.to_bytes(32, "big"), b"")
        block.expires_at = 1000.0 + number
        if number % 10 == 0:
            block.shared = Location("pack", 0, b"", 0)
            kept.append(block)
        deadlines.add(block)
    assert len(deadlines._queue) < 3 * len(kept)
    assert [block for block in deadlines.due(99_999.0) if block.present] == kept


def test_beyond_its_limit_the_shared_index_forgets_what_is_oldest_and_not_leased_there_alone() -> None:
    store, space = deep_store()
    assert store.shared is not None
    blocks = [adopt(store, space, number) for number in range(1, 9)]
    leased, plain, both = blocks[:3]
    assert leased is not None
    assert both is not None
    slot = store.room(store.memory, both)
    assert slot is not None
    store.place(store.memory, both, slot)
    store.pin([leased, both])
    adopt(store, space, 9)
    assert [block is not None and block.shared is not None for block in (leased, plain, both)] == [True, False, True]
    adopt(store, space, 10)
    assert (leased.shared is not None, both.shared) == (True, None), "what is in memory too is not lost with it"
    assert (store.shared.blocks, store.shared.counters.evictions) == (8, 2)
    store.check_integrity()
