"""The way from a hash to checked bytes in memory, whatever tier the block is in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from katydid_cache.records import BlockMissReason, Tier
from katydid_runtime.errors import DataCorruptError, NotFoundError

from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.disk.catalog import Row
from katydid_kvcache.disk.tier import DiskTier
from katydid_kvcache.memory import MemoryTier
from katydid_kvcache.shared.tier import SharedTier
from katydid_kvcache.slabs import Slot
from katydid_kvcache.store import Store

__all__ = ["Reader", "Reading"]


@dataclass(frozen=True, slots=True)
class Reading:
    """A block open for reading: its object, checked; where it was; pinned until `Reader.close`."""

    block: Block
    view: memoryview
    tier: Tier


class Reader:
    """Opens blocks. Concurrent readers of a block that is not in memory share one read from below.

    `promoted` is told of every block that has come up into memory.
    """

    def __init__(
        self,
        store: Store,
        memory: MemoryTier,
        disk: DiskTier | None,
        shared: SharedTier | None = None,
        promoted: Callable[[Block], object] = lambda _: None,
    ) -> None:
        self._store = store
        self._memory = memory
        self._disk = disk
        self._shared = shared
        self._promoted = promoted
        self._promotions: dict[Block, asyncio.Task[BlockMissReason | None]] = {}

    async def open(self, namespace: Namespace, block_hash: bytes, mask: int) -> Reading | BlockMissReason:
        """The block with these heads committed, checked, or why not."""
        block = self._store.find(namespace, block_hash, mask)
        if block is None:
            return BlockMissReason.ABSENT
        self._store.pin([block])
        opened: Reading | BlockMissReason = BlockMissReason.STORE_UNAVAILABLE
        try:
            opened = await self._checked(block, mask)
            return opened
        finally:
            if isinstance(opened, BlockMissReason):
                self._store.unpin([block])

    def close(self, reading: Reading) -> None:
        self._store.unpin([reading.block])

    async def promote(self, block: Block) -> BlockMissReason | None:
        """Bring a block from below into memory; None, or why not. Not ended by the caller's cancellation."""
        if block.memory is not None:
            return None
        task = self._promotions.get(block)
        if task is None:
            task = self._promotions[block] = asyncio.create_task(self._promote(block))
            task.add_done_callback(lambda _: self._promotions.pop(block, None))
        return await asyncio.shield(task)

    def withdraw_if_wrong(self, block: Block) -> bool:
        """Quarantine the slot in memory of a complete block that no longer holds it; whether it did."""
        if block.memory is None or not block.complete or self._memory.intact(block, block.namespace.all_heads):
            return False
        self._store.leave(self._store.memory, block, corrupt=True)
        return True

    async def check_disk(self, block: Block, scratch: memoryview) -> BlockMissReason | None:
        """Read a block's disk slot, if it has one, into `scratch` (page-aligned, large enough); None, or what is wrong.

        A slot that is CORRUPT is quarantined.
        """
        if block.disk is None:
            return None
        return await self._read_disk(block, block.disk, scratch[: block.namespace.slot_bytes])

    async def _checked(self, block: Block, mask: int) -> Reading | BlockMissReason:
        """The checked block; a copy in memory that went bad is quarantined and a good one on disk takes its place."""
        store = self._store
        tier = Tier.MEMORY
        if block.memory is not None and not self._memory.intact(block, mask):
            store.leave(store.memory, block, corrupt=True)
            if not block.present:
                return BlockMissReason.CORRUPT
        if block.memory is None:
            tier = Tier.SHARED if block.disk is None else Tier.DISK
            if (reason := await self.promote(block)) is not None:
                return reason
        return Reading(block, self._memory.view(block), tier)

    async def _promote(self, block: Block) -> BlockMissReason | None:
        store = self._store
        store.pin([block])
        try:
            slot = store.room(store.memory, block)
            if slot is None:
                return BlockMissReason.STORE_UNAVAILABLE
            reason = await self._read_below(block, self._memory.pages(block, slot))
            if reason is None and block.namespace.blocks.get(block.hash) is not block:
                reason = BlockMissReason.ABSENT  # it was withdrawn while it was read
            if reason is not None:
                store.memory.free(block, slot)
            else:
                store.place(store.memory, block, slot)
                self._promoted(block)
            return reason
        finally:
            store.unpin([block])

    async def _read_below(self, block: Block, into: memoryview) -> BlockMissReason | None:
        """Read a block from disk, or from the shared store when it is not to be had there."""
        reason: BlockMissReason | None = BlockMissReason.ABSENT
        if block.disk is not None:
            reason = await self._read_disk(block, block.disk, into)
        if reason is not None and block.only_shared and self._shared is not None:
            reason = await self._shared.read(block, into[: block.namespace.layout.block_bytes])
        return reason

    async def _read_disk(self, block: Block, slot: Slot, into: memoryview) -> BlockMissReason | None:
        store, namespace = self._store, block.namespace
        assert self._disk is not None
        assert store.disk is not None
        row = Row(namespace.identity, block.hash, block.parent, slot, block.checksum, block.expires_at)
        try:
            await self._disk.read(row, store.disk.slot_bytes(block), into, namespace.layout.block_bytes)
        except DataCorruptError:
            if block.disk == slot:
                store.leave(store.disk, block, corrupt=True)
            return BlockMissReason.CORRUPT
        except NotFoundError:
            if block.disk == slot:
                store.leave(store.disk, block)
            return BlockMissReason.ABSENT
        except OSError:
            return BlockMissReason.STORE_UNAVAILABLE
        return None
