"""Which block is where: the state of the cache as a plain object that does no I/O.

A block's slot in a tier goes free -> writing -> visible -> free. Writing and visible slots of pinned blocks stay; any
other may be evicted for room. Who calls this moves the bytes, and only then tells the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from katydid_cache.layout import BlockLayout, Span
from katydid_cache.records import PutRefusal, Tier
from katydid_runtime.errors import IdentityMismatchError, InvalidRequestError

from katydid_kvcache.blocks import ROW, Block, Namespace
from katydid_kvcache.changes import Change, Refusal, Write
from katydid_kvcache.deadlines import Deadlines
from katydid_kvcache.integrity import check_store
from katydid_kvcache.policy.pools import TierPolicy
from katydid_kvcache.prefix import Prefix, longest_prefix
from katydid_kvcache.shared.books import SharedBooks
from katydid_kvcache.shared.manifest import Entry
from katydid_kvcache.slabs import SlabAllocator, Slot
from katydid_kvcache.tier_books import TierBooks

__all__ = ["Change", "Refusal", "Store", "Write"]

_CHAIN_LIMIT = 4096
_RECORDED_SHARE = 0.25


class Store:
    """The index over all namespaces and tiers. Not thread-safe: one loop owns it.

    With `shared_blocks` it knows so many blocks of a shared store; they look absent while it is not `shared_reachable`.
    `changed` is told of every complete block that enters or leaves a tier, `renewed` of blocks on disk or in the shared
    store whose time has moved on. `now` gives Unix seconds and is asked for times to live only.
    """

    def __init__(
        self,
        memory: SlabAllocator[Block],
        disk: SlabAllocator[Block] | None,
        *,
        disk_header_bytes: int = 0,
        shared_blocks: int = 0,
        memory_policy: TierPolicy = TierPolicy(),
        disk_policy: TierPolicy = TierPolicy(),
        changed: Callable[[Change], None],
        renewed: Callable[[Block], None] = lambda _: None,
        now: Callable[[], float],
    ) -> None:
        self.namespaces: dict[bytes, Namespace] = {}
        self.memory = TierBooks(Tier.MEMORY, memory, policy=memory_policy)
        self.disk: TierBooks | None = None
        if disk is not None:
            self.disk = TierBooks(Tier.DISK, disk, header_bytes=disk_header_bytes, policy=disk_policy)
        self.shared: SharedBooks | None = None
        if shared_blocks:
            self.shared = SharedBooks(
                shared_blocks, lambda block, stored: changed(Change(block, Tier.SHARED, stored=stored))
            )
        self.shared_reachable = True
        self._changed = changed
        self._renewed = renewed
        self._now = now
        self._deadlines = Deadlines()
        self._uses = itertools.count(1)

    @property
    def tiers(self) -> list[TierBooks]:
        return [self.memory] if self.disk is None else [self.memory, self.disk]

    def namespace(self, identity: bytes, layout: BlockLayout) -> Namespace:
        """The namespace of an identity, made on first sight.

        Raises IdentityMismatchError when it is known with another layout, InvalidRequestError when a block would not
        fit a slab.
        """
        known = self.namespaces.get(identity)
        if known is not None:
            if known.layout != layout:
                raise IdentityMismatchError(
                    f"identity {identity.hex()[:16]} is known with another layout",
                    field="layout",
                    value=layout,
                    allowed=repr(known.layout),
                )
            return known
        for books in self.tiers:
            if layout.block_bytes + books.header_bytes > books.slots.slab_bytes:
                raise InvalidRequestError(
                    f"a block of {layout.block_bytes} bytes does not fit the slabs of tier {books.tier.name.lower()}",
                    field="layout.block_bytes",
                    value=layout.block_bytes,
                    allowed=f"<= {books.slots.slab_bytes - books.header_bytes}",
                )
        return self.namespaces.setdefault(identity, Namespace(identity, layout))

    def find(self, namespace: Namespace, block_hash: bytes, mask: int) -> Block | None:
        """The block if these heads of it are committed and its time is not up."""
        block = namespace.blocks.get(block_hash)
        if block is None or block.heads & mask != mask or self._expired(block):
            return None
        return None if block.only_shared and not self.shared_reachable else block

    def prefix(self, namespace: Namespace, hashes: Sequence[bytes], mask: int) -> Prefix:
        """The longest prefix of the chain that is present, counted as hits and the first miss."""
        now = self._now()
        ended = self._deadlines.passed(now)
        found = longest_prefix(namespace, hashes, mask, now, some_ended=ended, shared_reachable=self.shared_reachable)
        missed = len(hashes) - len(found.blocks)
        self.memory.counters.hits += found.in_memory
        self.memory.counters.misses += len(hashes) - found.in_memory
        if self.disk is not None:
            self.disk.counters.hits += len(found.blocks) - found.in_memory - found.in_shared
            self.disk.counters.misses += found.in_shared + missed
        if self.shared is not None:
            self.shared.counters.hits += found.in_shared
            self.shared.counters.misses += missed
        return found

    def touch(self, blocks: Sequence[Block], until: float = 0.0) -> None:
        """Mark a prefix, of one namespace, as just used; its deep end becomes the colder, so that suffixes go first.

        Blocks that are to end before `until` (Unix seconds) go on until then.
        """
        now = next(self._uses)
        # Blocks of one tenant share a queue in each tier; a prefix is of few tenants and may be thousands of blocks.
        touches: dict[bytes, list[Callable[[Block], None]]] = {}
        for block in reversed(blocks):
            block.used_at, block.guest = now, False
            if block.expires_at:
                self.extend(block, until)
            of_tenant = touches.get(block.tenant)
            if of_tenant is None:
                of_tenant = touches[block.tenant] = [books.order(block).touch for books in self.tiers]
            for touch in of_tenant:
                touch(block)

    def extend(self, block: Block, until: float) -> None:
        """A block that is to end is used: it goes on until then, and at least as long as it slides."""
        now = self._now()
        until = max(until, now + block.sliding_s)
        if until <= block.expires_at:
            return
        block.expires_at = until
        # The lower tiers need not know it to the second.
        below = block.disk is not None or block.shared is not None
        if below and until - block.recorded_until > _RECORDED_SHARE * (until - now):
            block.recorded_until = until
            self._renewed(block)

    def settle(self, namespace: Namespace, last: bytes) -> None:
        """A chain was written up to the block `last`: blocks before it are to stay longer than those behind."""
        chain: list[Block] = []
        while len(chain) < _CHAIN_LIMIT and (block := namespace.blocks.get(last)) is not None:
            if not block.guest:
                chain.append(block)
            last = block.parent
        for books in self.tiers:
            for one_of_pool in {books.pools.pool(block.tenant): block for block in chain}.values():
                books.order(one_of_pool).settle(chain[::-1])

    def pin(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.pins += 1

    def unpin(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.pins -= 1
            if block.pins == 0 and block.parked:
                block.parked = False
                for books, slot in self._places(block):
                    if slot is not None:
                        books.enqueue(block)

    def begin_write(
        self, namespace: Namespace, block_hash: bytes, parent: bytes, heads: Span, tenant: bytes = b""
    ) -> Write | Refusal:
        """Take (or join) the memory slot of a block to write `heads` of it. Ends with `finish_` or `abort_write`."""
        mask = namespace.mask(heads)
        block = namespace.blocks.get(block_hash)
        if block is not None and self._expired(block):
            if block.pins and block.complete:
                return Refusal(refusal=PutRefusal.BUSY)  # whoever reads it goes on; nobody else finds it any more
            if not block.pins:
                self.drop(block)
                block = None
        if block is not None and block.only_shared and not block.pins:
            return self._begin_over_shared(block, mask, heads, tenant)
        if block is not None and block.heads & mask == mask:
            return Refusal(present=block)
        if block is not None and block.heads & mask and not block.pins:
            # Another split of the heads half-wrote the block and left; start anew rather than mix the two.
            self.drop(block)
            block = None
        if block is not None and (block.heads | block.writing) & mask:
            return Refusal(refusal=PutRefusal.BUSY)
        if block is None:
            block = Block(namespace, block_hash, parent, tenant)
            block.memory = self.room(self.memory, block)
            if block.memory is None:
                return Refusal(refusal=self._no_room(block))
            namespace.blocks[block_hash] = block
            self._enter_memory(block)
        block.writing |= mask
        block.pins += 1
        return Write(block, heads, mask)

    def _begin_over_shared(self, block: Block, mask: int, heads: Span, tenant: bytes) -> Write | Refusal:
        """Write a block anew that is in the shared store alone: whoever sends it could not wait for it."""
        block.tenant = tenant
        block.memory = self.room(self.memory, block)
        if block.memory is None:
            return Refusal(refusal=self._no_room(block))
        block.heads, block.checksum, block.linear = 0, b"", 0
        self._enter_memory(block)
        block.writing = mask
        block.pins += 1
        return Write(block, heads, mask)

    def _enter_memory(self, block: Block) -> None:
        """A block about to be written has its slot."""
        block.guest, block.used_at = not self.memory.admits(block), next(self._uses)
        self.memory.enqueue(block)

    def finish_write(self, write: Write, checksum: bytes) -> bool:
        """The heads are in place with this checksum. True when the block has all heads: then call `complete`."""
        block = write.block
        block.writing &= ~write.mask
        block.heads |= write.mask
        block.parts[write.heads] = checksum
        return block.complete

    def complete(self, write: Write, checksum: bytes, expires_at: float, sliding_s: float = 0.0) -> None:
        """All heads are in place and `checksum` is that of the whole object: the block is visible."""
        block = write.block
        block.checksum = checksum
        block.parts = {}
        block.expires_at, block.sliding_s = expires_at, sliding_s
        self._deadlines.add(block)
        self.memory.counters.writes += 1
        self._note_row(block)
        self._entered(self.memory, block)

    def abort_write(self, write: Write) -> None:
        """The heads were not written; the block's slot is given back when nothing else is in it. Unpins."""
        block = write.block
        block.writing &= ~write.mask
        self.unpin([block])
        if not block.heads and not block.writing:
            self.leave(self.memory, block)

    def room(self, books: TierBooks, block: Block) -> Slot | None:
        """A slot for `block` in a tier, evicting what is to go first; None when everything that may go is pinned."""
        slot = books.allocate(block)
        if slot is not None:
            return slot
        crowd = books.emptiable_slab(block, lambda owner: self._slot(books, owner))
        if crowd is not None:
            for owner in crowd:
                self.evict(books, owner)
        elif (victim := books.victim(block)) is not None:
            self.evict(books, victim)
        return books.allocate(block)

    def place(self, books: TierBooks, block: Block, slot: Slot) -> None:
        """The bytes of a complete block are in `slot` of a tier, taken with `room`."""
        if books is self.memory:
            block.memory = slot
            self._note_row(block)
        else:
            block.disk = slot
            block.recorded_until = block.expires_at
        books.counters.writes += 1
        books.enqueue(block)
        self._entered(books, block)

    def restore(self, block: Block, slot: Slot) -> None:
        """A complete block found on disk at start; its slot is marked as taken already."""
        assert self.disk is not None
        block.heads = block.namespace.all_heads
        block.disk = slot
        block.recorded_until = block.expires_at
        block.namespace.blocks[block.hash] = block
        self._deadlines.add(block)
        self.disk.pools.charge(block.tenant, self.disk.slot_bytes(block))
        self.disk.enqueue(block)
        self._entered(self.disk, block)

    def evict(self, books: TierBooks, block: Block) -> None:
        """Drop a block from one tier to make room."""
        books.counters.evictions += 1
        self.leave(books, block)

    def leave(self, books: TierBooks, block: Block, *, corrupt: bool = False) -> None:
        """Drop a block from one tier; a `corrupt` slot is withdrawn. A block in no tier leaves the index."""
        slot = self._slot(books, block)
        if slot is None:
            return
        books.order(block).discard(block)
        if corrupt:
            books.counters.corrupt += 1
            books.withdraw(block, slot)
        else:
            books.free(block, slot)
        if books is self.memory:
            block.memory, block.row = None, b""
        else:
            block.disk = None
        if block.complete and block.checksum:
            books.blocks -= 1
            books.bytes -= block.namespace.block_bytes
            self._changed(Change(block, books.tier, stored=False))
        if block.only_shared and block.shared is not None:
            # What is left of it may have been computed by another instance.
            block.heads, block.parts = block.namespace.all_heads, {}
            block.checksum, block.linear = block.shared.checksum, block.shared.linear
        elif not block.present and block.namespace.blocks.get(block.hash) is block:
            del block.namespace.blocks[block.hash]

    def drop(self, block: Block) -> None:
        """Drop a block from all tiers."""
        for books in self.tiers:
            self.leave(books, block)
        if self.shared is not None:
            self.shared.leave(block)

    def adopt(self, namespace: Namespace, entry: Entry) -> None:
        """A block is in the shared store, put there by this instance or another, or was withdrawn from it."""
        if self.shared is None or 0 < entry.expires_at <= self._now():
            return
        block = namespace.blocks.get(entry.name)
        if entry.location is None:
            if block is not None:
                self.shared.leave(block)
            return
        if block is None:
            block = namespace.blocks[entry.name] = Block(namespace, entry.name, entry.parent, entry.tenant)
            block.heads = namespace.all_heads
            block.checksum, block.linear = entry.location.checksum, entry.location.linear
            block.expires_at, block.sliding_s = entry.expires_at, entry.sliding_s
            self._deadlines.add(block)
        if block.shared is None:
            self.shared.enter(block, entry.location)

    def expire(self) -> None:
        """Drop blocks whose time is up; pinned ones when they are no longer."""
        later = []
        for block in self._deadlines.due(self._now()):
            if block.present and (block.pins or not self._expired(block)):
                later.append(block)
            elif block.present:
                self.drop(block)
        for block in later:
            self._deadlines.add(block)

    def check_integrity(self) -> None:
        """Raises AssertionError when index, slots, queues and counters disagree."""
        check_store(self)

    def _no_room(self, block: Block) -> PutRefusal:
        """Why there is no room in memory for a block, counted."""
        if self.memory.pools.at_limit(block.tenant, self.memory.slot_bytes(block)):
            self.memory.counters.sheds["quota"] += 1
            return PutRefusal.QUOTA
        self.memory.counters.sheds["full"] += 1
        return PutRefusal.NO_ROOM

    def _expired(self, block: Block) -> bool:
        return bool(block.expires_at) and block.expires_at <= self._now()

    def _note_row(self, block: Block) -> None:
        """A complete block has come into memory."""
        assert block.memory is not None
        position = self.memory.slots.position(block.memory)
        block.row = ROW.pack(position, block.memory.generation, block.checksum, block.linear)

    def _slot(self, books: TierBooks, block: Block) -> Slot | None:
        return block.memory if books is self.memory else block.disk

    def _places(self, block: Block) -> list[tuple[TierBooks, Slot | None]]:
        places = [(self.memory, block.memory)]
        return places if self.disk is None else [*places, (self.disk, block.disk)]

    def _entered(self, books: TierBooks, block: Block) -> None:
        books.blocks += 1
        books.bytes += block.namespace.block_bytes
        self._changed(Change(block, books.tier, stored=True))
