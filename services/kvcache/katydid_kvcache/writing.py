"""The end of a write: check what arrived, make it visible, and carry it through to disk.

Writing through is bounded. When the disk is behind, a write that asked for it waits, and a block that may be lost stays
in memory alone until there is room in the queue; if it is evicted before, it is shed. Neither holds up another block.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from katydid_cache.in_place import GIVEN_UP, NOT_WRITTEN
from katydid_cache.records import PutOutcome, PutRefusal, PutStatus
from katydid_runtime.errors import OverloadedError

from katydid_kvcache.blocks import Block
from katydid_kvcache.checksums import linear_checksum, payload_checksum
from katydid_kvcache.disk.slot_header import SlotHeader
from katydid_kvcache.disk.tier import FULL, DiskTier
from katydid_kvcache.memory import MemoryTier
from katydid_kvcache.policy.lifetimes import Keep, Lifetimes
from katydid_kvcache.slabs import Slot
from katydid_kvcache.store import Store, Write

__all__ = ["Claim", "Writer", "commit"]

_FLUSH_BLOCKS = 64
_SIGHT_BLOCKS = 8
# What is claimed of a slot that was given up; no need to look at its bytes.
_NOT_WRITTEN = (GIVEN_UP, NOT_WRITTEN)

logger = logging.getLogger(__name__)

Claim: TypeAlias = bytes | int
"""What a client says of the bytes it wrote: xxh3-128 (16 bytes), or of a whole block its 64-bit linear checksum."""


class Sight(NamedTuple):
    """Checksums of the bytes that lie in a slot: xxh3-128, and where a client claims it the linear one, else 0."""

    checksum: bytes
    linear: int


def _refused(refusal: PutRefusal) -> PutOutcome:
    return PutOutcome(PutStatus.REFUSED, refusal)


class Writer:
    """Finishes writes into `memory` and writes blocks through to `disk`, at most `queue_bytes` at a time.

    `completed` is told of every block that has all its heads, and is to call `follow`.

    It refuses with CHECKSUM and CORRUPT, a write that must reach the disk also with NO_DISK, DISK_FAILING, DISK_FULL.
    """

    def __init__(
        self,
        store: Store,
        memory: MemoryTier,
        disk: DiskTier | None,
        *,
        queue_bytes: int,
        lifetimes: Lifetimes,
        completed: Callable[[Block], None],
    ) -> None:
        self._store = store
        self._memory = memory
        self._disk = disk
        self._queue_bytes = queue_bytes
        self._lifetimes = lifetimes
        self._completed = completed
        self._in_flight: dict[Block, asyncio.Future[PutRefusal | None]] = {}
        self._bytes_in_flight = 0
        self._room_made = asyncio.Event()
        self._backlog: dict[Block, None] = {}  # in order of arrival
        self._completions: dict[Block, set[asyncio.Future[None]]] = {}

    @property
    def bytes_in_flight(self) -> int:
        """Bytes on their way to disk."""
        return self._bytes_in_flight

    def sight(self, write: Write, claimed: Claim) -> Callable[[], Sight | None]:
        """What looks at the bytes in the slot of `write` for `finish`, in whatever thread; None: there are none."""
        if write.block.memory is None or claimed in _NOT_WRITTEN:
            return lambda: None
        view, namespace = self._memory.view(write.block), write.block.namespace
        runs = [range(len(view))] if write.whole else namespace.layout.runs(write.heads)
        linear = isinstance(claimed, int)
        return lambda: Sight(payload_checksum(view, runs), linear_checksum(view) if linear else 0)

    def finish(self, write: Write, claimed: Claim, keep: Keep, seen: Sight | None = None) -> PutOutcome:
        """All bytes of `write` are in its slot; `claimed` is the checksum the client sent for them.

        A block that has all its heads now is visible, and on its way to disk if the disk keeps up. `seen` is what
        `sight` gave; without it the bytes are looked at now.
        """
        store, block = self._store, write.block
        seen = seen or self.sight(write, claimed)()
        if block.memory is None:
            store.abort_write(write)
            return _refused(PutRefusal.CORRUPT)
        if seen is None or claimed != (seen.linear if isinstance(claimed, int) else seen.checksum):
            store.abort_write(write)
            return _refused(PutRefusal.CHECKSUM)
        block.linear, computed = seen.linear, seen.checksum
        try:
            if store.finish_write(write, computed):
                checksum = computed if write.whole else self._memory.join(block)
                if checksum is None:
                    store.leave(store.memory, block, corrupt=True)
                    return _refused(PutRefusal.CORRUPT)
                self._complete(write, checksum, keep)
            return PutOutcome(PutStatus.STORED)
        finally:
            store.unpin([block])

    def finish_checked(self, write: Write, checksum: bytes) -> None:
        """`finish` for a whole block that was received and hashed by a process of this service's own."""
        if self._store.finish_write(write, checksum):
            self._complete(write, checksum, Keep())
        self._store.unpin([write.block])

    def abort(self, write: Write) -> None:
        """Give a write up."""
        self._store.abort_write(write)

    def reach_disk(self, block: Block, outcome: PutOutcome) -> asyncio.Task[PutOutcome]:
        """Wait until a block has all its heads and is on disk; `outcome` then, or why it can't be.

        The block stays pinned meanwhile. The task may be cancelled by whoever asked.
        """
        self._store.pin([block])
        task = asyncio.create_task(self._reach_disk(block, outcome))
        task.add_done_callback(lambda _: self._store.unpin([block]))
        return task

    async def _reach_disk(self, block: Block, outcome: PutOutcome) -> PutOutcome:
        if not block.complete:
            await self._completion(block)
        while block not in self._in_flight and self._bytes_in_flight >= self._queue_bytes:
            self._room_made.clear()
            await self._room_made.wait()
        refusal = await asyncio.shield(self.write_through(block))
        return outcome if refusal is None else _refused(refusal)

    def _complete(self, write: Write, checksum: bytes, keep: Keep) -> None:
        """All heads are there: make the block visible, send it on its way to disk, and tell who waits for it."""
        self._store.complete(write, checksum, *self._lifetimes.of_write(keep))
        self._completed(write.block)
        for waiting in self._completions.pop(write.block, ()):
            if not waiting.done():
                waiting.set_result(None)

    async def _completion(self, block: Block) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._completions.setdefault(block, set()).add(waiting)
        try:
            await waiting
        finally:
            if (others := self._completions.get(block)) is not None:
                others.discard(waiting)
                if not others:
                    del self._completions[block]

    def follow(self, block: Block) -> None:
        """Send a complete block to disk when the disk gets to it, if it is worth what it would displace there."""
        disk = self._store.disk
        if block in self._in_flight or block in self._backlog or (disk is not None and not disk.wants(block)):
            return
        if self._bytes_in_flight + block.namespace.slot_bytes <= self._queue_bytes:
            self.write_through(block)
            return
        self._backlog[block] = None
        if len(self._backlog) > self._store.memory.blocks:
            # The longest waiting have been evicted, or soon will be.
            self._shed(self._next_waiting(), "queue_full")

    def write_through(self, block: Block) -> asyncio.Future[PutRefusal | None]:
        """Send a complete block to disk now, if it isn't there. The result is None once it is durable."""
        if (in_flight := self._in_flight.get(block)) is not None:
            return in_flight
        result: asyncio.Future[PutRefusal | None] = asyncio.get_running_loop().create_future()
        store, disk = self._store, self._disk
        if block.disk is not None:
            result.set_result(None)
        elif disk is None or store.disk is None:
            result.set_result(PutRefusal.NO_DISK)
        elif not disk.healthy:
            self._shed(block, "failing")
            result.set_result(PutRefusal.DISK_FAILING)
        elif block.memory is None or (slot := store.room(store.disk, block)) is None:
            self._shed(block, "full")
            result.set_result(PutRefusal.DISK_FULL)
        else:
            self._start(disk, block, slot, result)
        return result

    async def flush(self) -> int:
        """Write every complete block in memory through to disk; how many were not there before.

        Raises OverloadedError naming how many could not be written.
        """
        blocks = [
            block
            for namespace in self._store.namespaces.values()
            for block in namespace.blocks.values()
            if block.complete and block.memory is not None and block.disk is None
        ]
        refusals: Counter[PutRefusal | None] = Counter()
        for start in range(0, len(blocks), _FLUSH_BLOCKS):
            batch = [block for block in blocks[start : start + _FLUSH_BLOCKS] if block.memory is not None]
            writes = [asyncio.shield(self.write_through(block)) for block in batch]
            refusals.update(await asyncio.gather(*writes))
        written = refusals.pop(None, 0)
        if refusals:
            told = ", ".join(f"{count} {refusal.name.lower()}" for refusal, count in refusals.items() if refusal)
            raise OverloadedError(f"{refusals.total()} blocks were not written: {told}")
        return written

    def _shed(self, block: Block, reason: str) -> None:
        if self._store.disk is not None and block.disk is None:
            self._store.disk.counters.sheds[reason] += 1

    def _next_waiting(self) -> Block:
        block = next(iter(self._backlog))
        del self._backlog[block]
        return block

    def _catch_up(self) -> None:
        """Send what has waited, as far as the queue has room."""
        while self._backlog and self._bytes_in_flight < self._queue_bytes:
            block = self._next_waiting()
            if block.memory is not None:
                self.write_through(block)
            else:
                self._shed(block, "evicted")

    def _start(self, disk: DiskTier, block: Block, slot: Slot, result: asyncio.Future[PutRefusal | None]) -> None:
        namespace = block.namespace
        assert block.memory is not None
        assert self._store.disk is not None
        header = SlotHeader(
            namespace.identity,
            block.hash,
            block.parent,
            slot.generation,
            block.checksum,
            block.expires_at,
            namespace.layout,
            block.tenant,
            block.sliding_s,
            block.linear,
        )
        self._store.pin([block])
        self._in_flight[block] = result
        self._bytes_in_flight += namespace.slot_bytes
        disk.write(
            header,
            slot,
            self._store.disk.slot_bytes(block),
            self._memory.pages(block, block.memory),
            lambda error: self._written(block, slot, error),
        )

    def _written(self, block: Block, slot: Slot, error: OSError | None) -> None:
        store = self._store
        assert store.disk is not None
        assert self._disk is not None
        refusal: PutRefusal | None = None
        if error is not None:
            refusal = PutRefusal.DISK_FULL if error.errno in FULL else PutRefusal.DISK_FAILING
            store.disk.counters.sheds[refusal.name.lower().removeprefix("disk_")] += 1
            store.disk.free(block, slot)
            if refusal is PutRefusal.DISK_FULL:
                slots = store.disk.slots
                if missing := slots.stop_growing() * slots.slab_bytes:
                    logger.warning(
                        "the disk is full: its tier stays at the size it has reached", extra={"missing_bytes": missing}
                    )
        elif block.namespace.blocks.get(block.hash) is block:
            store.place(store.disk, block, slot)
        else:
            # Its memory slot turned out corrupt while it was written: nobody may find it again. A block that took its
            # place in the index writes its own row later, which this must not delete.
            refusal = PutRefusal.CORRUPT
            store.disk.free(block, slot)
            if block.hash not in block.namespace.blocks:
                self._disk.delete(block.namespace.identity, block.hash)
        self._bytes_in_flight -= block.namespace.slot_bytes
        self._room_made.set()
        self._in_flight.pop(block).set_result(refusal)
        store.unpin([block])
        self._catch_up()


async def commit(
    writer: Writer, writes: Sequence[Write], claims: Sequence[Claim], keep: Keep, *, durable: bool
) -> list[PutOutcome]:
    """Finish `writes` whose slots were written in place, one claim each.

    The bytes are looked at in threads, some at a time: to hash them takes longer than everything else here, and the
    loop has others to serve. A thread alone hashes 5 GB/s, a tenth of what a GPU writes.
    """
    outcomes: list[PutOutcome] = []
    reaching: list[tuple[int, asyncio.Task[PutOutcome]]] = []
    left = list(writes)
    try:
        while left:
            some = claims[len(outcomes) : len(outcomes) + _SIGHT_BLOCKS]
            sights = [writer.sight(write, claim) for write, claim in zip(left, some, strict=False)]
            # The threads may read slots that are given up meanwhile; they write nothing.
            seen = await asyncio.gather(*(asyncio.to_thread(look) for look in sights))
            for claim, each in zip(some, seen, strict=True):
                write = left.pop(0)
                outcome = writer.finish(write, claim, keep, each)
                outcomes.append(outcome)
                if durable and outcome.status is PutStatus.STORED:
                    reaching.append((len(outcomes) - 1, writer.reach_disk(write.block, outcome)))
        for index, task in reaching:
            outcomes[index] = await task
        return outcomes
    finally:
        for write in left:
            writer.abort(write)
        for _, task in reaching:
            task.cancel()
