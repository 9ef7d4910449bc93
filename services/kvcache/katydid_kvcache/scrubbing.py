"""Looks for wrong bytes before anyone asks for them: every copy of every block is read again, a little at a time.

What is read by clients is checked on the way. The scrubber finds what rots unread, while the block may still be good in
another tier; a bad slot is quarantined like one found by a reader.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from katydid_cache.records import BlockMissReason

from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.memory import MemoryTier
from katydid_kvcache.reading import Reader
from katydid_kvcache.store import Store

__all__ = ["Scrubber", "Verified"]

_IDLE_S = 1.0
_RETRY_S = 60.0

logger = logging.getLogger(__name__)


class Verified(NamedTuple):
    """Blocks looked at, how many of them had a wrong copy, and how many one that could not be read."""

    blocks: int
    corrupt: int
    unreadable: int


class Scrubber:
    """Checks blocks in memory and on disk. `blocks`, `bytes` and `corrupt` count copies checked since the start."""

    def __init__(self, store: Store, memory: MemoryTier, reader: Reader) -> None:
        self._store = store
        self._memory = memory
        self._reader = reader
        self.blocks = 0
        self.bytes = 0
        self.corrupt = 0
        self.passes = 0

    async def run(self, bytes_per_s: float) -> None:
        """Go round for ever at this rate; 0 never begins."""
        while bytes_per_s:
            try:
                for namespace in [*self._store.namespaces.values()]:
                    await self._go_through(namespace, bytes_per_s)
                self.passes += 1
            except Exception:
                logger.exception("scrubbing failed")  # the cache must go on being looked at, and served
                await asyncio.sleep(_RETRY_S)
            await asyncio.sleep(_IDLE_S)

    async def check(self, block: Block, scratch: memoryview) -> bool:
        """Read all copies of a complete block; False when one was wrong, which is quarantined now.

        `scratch` is page-aligned and holds a slot.
        """
        return await self._look(block, scratch) is not BlockMissReason.CORRUPT

    async def _look(self, block: Block, scratch: memoryview) -> BlockMissReason | None:
        """`check`; None, or what is wrong: CORRUPT, or STORE_UNAVAILABLE where the disk could not be read."""
        store = self._store
        store.pin([block])
        try:
            good = block.memory is None or self._memory.intact(block, block.namespace.all_heads)
            self.bytes += len(scratch) * ((block.memory is not None) + (block.disk is not None))
            if not good:
                store.leave(store.memory, block, corrupt=True)
            wrong = await self._reader.check_disk(block, scratch)
        finally:
            store.unpin([block])
        if not good:
            wrong = BlockMissReason.CORRUPT
        self.blocks += 1
        self.corrupt += wrong is BlockMissReason.CORRUPT
        return wrong

    async def verify(self) -> Verified:
        """Read every copy of every block and quarantine those whose checksum is wrong."""
        found: Counter[BlockMissReason | None] = Counter()
        for namespace in [*self._store.namespaces.values()]:
            scratch = memoryview(mmap.mmap(-1, namespace.slot_bytes))
            for block in [*namespace.blocks.values()]:
                if not block.present or not block.complete:
                    continue
                found[await self._look(block, scratch)] += 1
                await asyncio.sleep(0)
        return Verified(found.total(), found[BlockMissReason.CORRUPT], found[BlockMissReason.STORE_UNAVAILABLE])

    async def look_at(self, namespace: Namespace, names: Sequence[bytes]) -> int:
        """Look at blocks that were wrong to a reader; how many are wrong in memory, and quarantined now."""
        wrong = 0
        for name in names:
            block = namespace.blocks.get(name)
            if block is not None:
                wrong += self._reader.withdraw_if_wrong(block)
                await asyncio.sleep(0)
        return wrong

    async def _go_through(self, namespace: Namespace, bytes_per_s: float) -> None:
        scratch = memoryview(mmap.mmap(-1, namespace.slot_bytes))
        for block_hash in [*namespace.blocks]:
            block = namespace.blocks.get(block_hash)
            if block is None or not block.complete:
                continue
            before = self.bytes
            if not await self.check(block, scratch):
                logger.error("wrong bytes found by scrubbing", extra={"block": block_hash.hex()[:16]})
            await asyncio.sleep((self.bytes - before) / bytes_per_s)
