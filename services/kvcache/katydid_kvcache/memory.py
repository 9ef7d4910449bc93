"""The memory tier's bytes: where in the arena a block's slot lies, and whether it still holds what was committed."""

from __future__ import annotations

from katydid_cache.layout import Span

from katydid_kvcache.arena import Arena
from katydid_kvcache.blocks import Block
from katydid_kvcache.checksums import payload_checksum
from katydid_kvcache.slabs import SlabAllocator, Slot

__all__ = ["MemoryTier"]


class MemoryTier:
    """Views of the slots that `slots` deals out of `arena`."""

    def __init__(self, arena: Arena, slots: SlabAllocator[Block]) -> None:
        self.arena = arena
        self.slots = slots

    def view(self, block: Block) -> memoryview:
        """The object of a block that is in memory."""
        assert block.memory is not None
        start = self.slots.position(block.memory)
        return self.arena.view(0, start, block.namespace.block_bytes)

    def pages(self, block: Block, slot: Slot) -> memoryview:
        """All pages of a slot for `block`, page-aligned: what direct I/O moves."""
        return self.arena.view(slot.slab, self.slots.offset(slot), block.namespace.slot_bytes)

    def intact(self, block: Block, mask: int) -> bool:
        """Whether the heads in `mask` still have the checksums they were committed with."""
        view, namespace = self.view(block), block.namespace
        if block.complete:
            return payload_checksum(view, [range(len(view))]) == block.checksum
        return all(
            payload_checksum(view, namespace.layout.runs(heads)) == checksum
            for heads, checksum in block.parts.items()
            if namespace.mask(heads) & mask
        )

    def join(self, block: Block) -> bytes | None:
        """Checksum of a whole object written in parts; None when a part is no longer what was committed."""
        view, layout = self.view(block), block.namespace.layout
        for heads, checksum in block.parts.items():
            if payload_checksum(view, layout.runs(heads)) != checksum:
                return None
        return payload_checksum(view, layout.runs(Span()))
