"""The store under random operations against a plain model, with its own integrity check after every step.

The model knows only what the store announced: a set of (tier, hash) built from its changes. Whatever the store evicts
is its choice, but nothing pinned may go, nothing may be found that was not announced, and the books must balance.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from katydid_cache.layout import BlockLayout, Span
from katydid_cache.records import PutRefusal, Tier
from katydid_kvcache.blocks import ROW, Block
from katydid_kvcache.policy.eviction import EVICTIONS
from katydid_kvcache.policy.pools import Quota, TierPolicy
from katydid_kvcache.shared.manifest import Entry, Location
from katydid_kvcache.slabs import SlabAllocator
from katydid_kvcache.store import Change, Refusal, Store, Write
from katydid_runtime.errors import IdentityMismatchError, InvalidRequestError

PAGE = 4096
SMALL = BlockLayout(layers=1, kv_heads=2, head_dim=16, dtype="float8_e4m3fn")
LARGE = BlockLayout(layers=2, kv_heads=2, head_dim=32, dtype="bfloat16")
ALL, LOW, HIGH = Span(0, 2), Span(0, 1), Span(1, 1)
TENANT, OTHER = b"t" * 16, b"o" * 16
QUOTAS = {TENANT: Quota(guaranteed_bytes=6 * PAGE, limit_bytes=12 * PAGE), OTHER: Quota(limit_bytes=5 * PAGE)}


class Books(RuleBasedStateMachine):
    @initialize(with_disk=st.booleans(), eviction=st.sampled_from(EVICTIONS), quotas=st.booleans())
    def open(self, with_disk: bool, eviction: str, quotas: bool) -> None:
        policy = TierPolicy(eviction, "adaptive", QUOTAS if quotas else {})
        self.now = 1000.0
        self.announced: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.store = Store(
            SlabAllocator(3, 8 * PAGE),
            SlabAllocator(3, 16 * PAGE) if with_disk else None,
            disk_header_bytes=PAGE,
            shared_blocks=6,
            memory_policy=policy,
            disk_policy=policy,
            changed=self.change,
            now=lambda: self.now,
        )
        self.namespaces = [self.store.namespace(bytes([n]) * 32, layout) for n, layout in enumerate((SMALL, LARGE))]
        self.writes: list[Write] = []
        self.pinned: list[Block] = []

    def change(self, change: Change) -> None:
        names = self.announced[change.tier]
        key = change.block.namespace.identity[:1] + change.block.hash
        assert (key in names) != change.stored, "announced twice, or gone without having come"
        (names.add if change.stored else names.discard)(key)

    @rule(
        namespace=st.integers(0, 1),
        name=st.integers(0, 14),
        heads=st.sampled_from([ALL, LOW, HIGH]),
        tenant=st.sampled_from([b"", TENANT, OTHER]),
    )
    def begin(self, namespace: int, name: int, heads: Span, tenant: bytes) -> None:
        space = self.namespaces[namespace]
        block_hash = bytes([name]) * 32
        mask = space.mask(heads)
        before = space.blocks.get(block_hash)
        held = 0 if before is None or 0 < before.expires_at <= self.now else before.heads
        if before is not None and before.only_shared and not before.pins:
            held = 0  # who sends a block that is in the shared store alone may write it anew
        begun = self.store.begin_write(space, block_hash, bytes([name - 1]) * 32 if name else b"", heads, tenant)
        if isinstance(begun, Refusal):
            assert (begun.present is not None) == (held & mask == mask)
            refusals = (PutRefusal.BUSY, PutRefusal.NO_ROOM, PutRefusal.QUOTA)
            assert begun.present is not None or begun.refusal in refusals
        else:
            assert begun.block.writing & mask == mask
            assert not any(w.block is begun.block and w.mask & mask for w in self.writes)
            self.writes.append(begun)

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), ok=st.booleans(), ttl=st.sampled_from([0, 5]))
    def end(self, data: st.DataObject, ok: bool, ttl: int) -> None:
        write = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
        if not ok:
            self.store.abort_write(write)
            return
        if self.store.finish_write(write, b"part"):
            self.store.complete(write, b"whole", self.now + ttl if ttl else 0.0)
        self.store.unpin([write.block])

    @rule(namespace=st.integers(0, 1), name=st.integers(0, 14))
    def settle(self, namespace: int, name: int) -> None:
        self.store.settle(self.namespaces[namespace], bytes([name]) * 32)

    @rule(data=st.data(), lease=st.booleans())
    def look_up(self, data: st.DataObject, lease: bool) -> None:
        space = self.namespaces[data.draw(st.integers(0, 1))]
        hashes = [bytes([n]) * 32 for n in data.draw(st.lists(st.integers(0, 14), max_size=6))]
        found, rows, *_ = self.store.prefix(space, hashes, space.all_heads)
        assert rows == b"".join(block.row for block in found)
        assert sum(block.memory is not None for block in found) * ROW.size == len(rows)
        for block in found:
            key = space.identity[:1] + block.hash
            assert any(key in names for names in self.announced.values())
            assert not 0 < block.expires_at <= self.now
            assert self.store.shared_reachable or not block.only_shared
        if len(found) < len(hashes):
            missing = space.blocks.get(hashes[len(found)])
            assert (
                missing is None
                or not missing.complete
                or 0 < missing.expires_at <= self.now
                or (missing.only_shared and not self.store.shared_reachable)
            )
        self.store.touch(found)
        if lease:
            self.store.pin(found)
            self.pinned += found

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.store.unpin([self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))])

    @precondition(lambda self: self.store.disk)
    @rule(data=st.data())
    def write_through(self, data: st.DataObject) -> None:
        assert self.store.disk is not None
        block = self.some_block(data)
        if block is None or not block.complete or block.disk is not None:
            return
        self.store.pin([block])
        slot = self.store.room(self.store.disk, block)
        if slot is not None and data.draw(st.booleans()):
            self.store.place(self.store.disk, block, slot)
        elif slot is not None:
            self.store.disk.free(block, slot)
        self.store.unpin([block])

    @precondition(lambda self: self.store.disk)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        block = self.some_block(data)
        if block is None or block.memory is not None:
            return
        self.store.pin([block])
        slot = self.store.room(self.store.memory, block)
        if slot is not None:
            self.store.place(self.store.memory, block, slot)
        self.store.unpin([block])

    @rule(namespace=st.integers(0, 1), name=st.integers(0, 14), ttl=st.sampled_from([0, 5]), withdrawn=st.booleans())
    def adopt(self, namespace: int, name: int, ttl: int, withdrawn: bool) -> None:
        block = self.namespaces[namespace].blocks.get(bytes([name]) * 32)
        if withdrawn and block is not None and block.pins:
            return
        where = None if withdrawn else Location(f"pack-{name}", 0, b"shared", 1)
        entry = Entry(bytes([name]) * 32, b"", TENANT, self.now + ttl if ttl else 0.0, 0.0, where)
        self.store.adopt(self.namespaces[namespace], entry)

    @rule(data=st.data(), reachable=st.booleans())
    def lose_from_shared(self, data: st.DataObject, reachable: bool) -> None:
        self.store.shared_reachable = reachable
        block = self.some_block(data)
        if block is not None and block not in self.pinned and not block.pins and self.store.shared is not None:
            self.store.shared.leave(block)

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        block = self.some_block(data)
        if block is None or not block.complete or self.store.memory.slots.withdrawn > 2 or block in self.pinned:
            return
        tier = self.store.tiers[data.draw(st.integers(0, len(self.store.tiers) - 1))]
        self.store.leave(tier, block, corrupt=True)

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.store.expire()
        for space in self.namespaces:
            for block in space.blocks.values():
                assert block.pins or not 0 < block.expires_at <= self.now

    def some_block(self, data: st.DataObject) -> Block | None:
        blocks = [block for space in self.namespaces for block in space.blocks.values()]
        return data.draw(st.sampled_from(blocks)) if blocks else None

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check_integrity()
        for books in self.store.tiers:
            for tenant in (TENANT, OTHER):
                limit = books.pools.quota(tenant).limit_bytes
                assert not limit or books.pools.used(tenant) <= limit
            held = {
                space.identity[:1] + block.hash
                for space in self.namespaces
                for block in space.blocks.values()
                if block.complete and (block.memory if books.tier is Tier.MEMORY else block.disk) is not None
            }
            assert held == self.announced[books.tier]
        blocks = [block for space in self.namespaces for block in space.blocks.values()]
        shared = {block.namespace.identity[:1] + block.hash for block in blocks if block.shared is not None}
        assert shared == self.announced[Tier.SHARED]
        assert len(shared) <= 6 or all(block.pins for block in blocks if block.only_shared)
        for block in blocks:
            assert not block.only_shared or block.checksum == b"shared"
        for block in self.pinned:
            assert block.namespace.blocks.get(block.hash) is block, "a leased block went away"
        for write in self.writes:
            assert write.block.memory is not None, "a slot went away while it was written"
        for space in self.namespaces:
            for block in space.blocks.values():
                wanted = self.pinned.count(block) + sum(write.block is block for write in self.writes)
                assert block.pins == wanted


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


def make_store(slabs: int = 2, policy: TierPolicy = TierPolicy()) -> Store:
    slots: SlabAllocator[Block] = SlabAllocator(slabs, 8 * PAGE)
    return Store(slots, None, memory_policy=policy, changed=lambda _: None, now=lambda: 0.0)


def write(
    store: Store, identity: bytes, layout: BlockLayout, name: int, tenant: bytes = b"", parent: int | None = None
) -> Block:
    before = b"" if parent is None else bytes([parent]) * 32
    begun = store.begin_write(store.namespace(identity, layout), bytes([name]) * 32, before, ALL, tenant)
    assert isinstance(begun, Write)
    assert store.finish_write(begun, b"sum")
    store.complete(begun, b"sum", 0.0)
    store.unpin([begun.block])
    return begun.block


def test_the_least_recently_used_block_goes_and_suffix_before_prefix() -> None:
    store = make_store(1)
    blocks = [write(store, b"a" * 32, SMALL, name) for name in range(8)]
    store.touch(blocks[:4])
    for name in range(8, 12):
        write(store, b"a" * 32, SMALL, name)
    assert [block.present for block in blocks] == [True] * 4 + [False] * 4
    write(store, b"a" * 32, SMALL, 12)
    assert [block.present for block in blocks[:4]] == [True, True, True, False]


def test_another_layout_gets_its_share_of_a_full_cache() -> None:
    store = make_store(2)
    for name in range(16):
        write(store, b"a" * 32, SMALL, name)
    newcomers = [write(store, b"b" * 32, LARGE, name) for name in range(2)]
    assert newcomers[-1].present
    assert len(store.namespaces[b"a" * 32].blocks) == 8
    store.check_integrity()


def test_a_known_identity_keeps_its_layout() -> None:
    store = make_store()
    store.namespace(b"a" * 32, SMALL)
    with pytest.raises(IdentityMismatchError) as caught:
        store.namespace(b"a" * 32, LARGE)
    assert caught.value.field == "layout"


def test_a_block_larger_than_a_slab_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_store().namespace(b"a" * 32, BlockLayout(layers=9, kv_heads=2, head_dim=32, dtype="float32"))
    assert caught.value.field == "layout.block_bytes"


def test_a_chain_that_was_written_goes_from_its_end() -> None:
    store = make_store(1)
    blocks = [write(store, b"a" * 32, SMALL, name, parent=name - 1 if name else None) for name in range(8)]
    store.settle(blocks[0].namespace, blocks[-1].hash)
    for name in range(8, 11):
        write(store, b"a" * 32, SMALL, name)
    assert [block.present for block in blocks] == [True] * 5 + [False] * 3


def test_what_is_not_admitted_to_a_full_tier_displaces_only_its_like() -> None:
    store = make_store(1, TierPolicy(admission="second_touch"))
    blocks = [write(store, b"a" * 32, SMALL, name) for name in range(8)]
    store.touch(blocks)
    for name in range(20, 30):
        write(store, b"a" * 32, SMALL, name)
    assert sum(block.present for block in blocks) == 7
    hashes = [bytes([40]) * 32]
    for _ in range(2):
        store.memory.ghosts.observe(hashes, PAGE)
    back = write(store, b"a" * 32, SMALL, 40)
    write(store, b"a" * 32, SMALL, 41)
    write(store, b"a" * 32, SMALL, 42)
    assert back.present


def test_a_tenant_keeps_its_guarantee_and_may_borrow_up_to_its_limit() -> None:
    quota = Quota(guaranteed_bytes=3 * PAGE, limit_bytes=6 * PAGE)
    store = make_store(1, TierPolicy(admission="all", quotas={TENANT: quota}))
    lent = [write(store, b"a" * 32, SMALL, name, TENANT) for name in range(6)]
    assert store.memory.pools.used(TENANT) == 6 * PAGE
    write(store, b"a" * 32, SMALL, 6, TENANT)
    assert [block.present for block in lent] == [False, True, True, True, True, True]
    others = [write(store, b"a" * 32, SMALL, name) for name in range(10, 30)]
    assert sum(block.present for block in lent) == 2
    assert store.memory.pools.used(TENANT) == 3 * PAGE
    assert sum(block.present for block in others) == 5
    write(store, b"a" * 32, SMALL, 30, TENANT)
    assert store.memory.pools.used(TENANT) == 4 * PAGE, "the longest unused block was another's, beyond its guarantee"
    store.check_integrity()


def test_a_tenant_at_its_limit_with_everything_pinned_is_refused() -> None:
    store = make_store(1, TierPolicy(each=Quota(limit_bytes=2 * PAGE)))
    blocks = [write(store, b"a" * 32, SMALL, name, TENANT) for name in range(2)]
    store.pin(blocks)
    refused = store.begin_write(blocks[0].namespace, b"x" * 32, b"", ALL, TENANT)
    assert refused == Refusal(refusal=PutRefusal.QUOTA)
    assert write(store, b"a" * 32, SMALL, 9, OTHER).present
    store.unpin(blocks)
    assert write(store, b"a" * 32, SMALL, 10, TENANT).present
    assert store.memory.pools.used(TENANT) == 2 * PAGE
