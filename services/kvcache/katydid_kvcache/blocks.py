"""Blocks and namespaces: the index in memory, one record a block, whatever tiers it is in."""

from __future__ import annotations

import struct

from katydid_cache.layout import BlockLayout, Span

from katydid_kvcache.shared.manifest import Location
from katydid_kvcache.slabs import Slot

__all__ = ["PAGE_BYTES", "ROW", "Block", "Namespace"]

PAGE_BYTES = 4096

ROW = struct.Struct("<QQ16sQ")
"""What answers say of a block in memory: offset in the arena, generation, xxh3-128 and linear checksum."""


class Namespace:
    """All blocks of one model identity. `slot_bytes` is the block size rounded up to whole pages."""

    __slots__ = ("all_heads", "block_bytes", "blocks", "identity", "layout", "slot_bytes")

    def __init__(self, identity: bytes, layout: BlockLayout) -> None:
        self.identity = identity
        self.layout = layout
        self.block_bytes = layout.block_bytes
        self.slot_bytes = -(-layout.block_bytes // PAGE_BYTES) * PAGE_BYTES
        self.all_heads = (1 << layout.kv_heads) - 1
        self.blocks: dict[bytes, Block] = {}

    def mask(self, heads: Span) -> int:
        """One bit a head of the range. Raises InvalidRequestError for heads that don't exist."""
        if not heads.first and heads.count in (0, self.layout.kv_heads):
            return self.all_heads
        wanted = heads.resolve(self.layout.kv_heads, "heads")
        return (1 << wanted.stop) - (1 << wanted.start)

    def covers(self, heads: Span) -> bool:
        """Whether the range is all heads."""
        return self.mask(heads) == self.all_heads


class Block:
    """What is known of one block.

    `memory`, `disk` and `shared` are where it is, None where it isn't. `heads` has a bit for each committed head,
    `writing` for each head being written; a block is complete when all heads are committed. `checksum` is xxh3-128 of
    the whole object of a complete block; until then `parts` holds one checksum for each range of heads committed.
    `pins` counts the leases, reads and writes that need the block to stay. `expires_at` is in Unix seconds, 0 for
    never; every use moves it to `sliding_s` from then if that is not 0; `recorded_until` is what the lower tiers know
    of it. `tenant` is who wrote it, 16 bytes or empty. `linear` is the 64-bit linear checksum that a GPU made of a
    whole block, 0 when none did. `used_at` is the number of its last use among the uses of all blocks; `guest` is True
    until the next use of a block that was not admitted when written. `row` is its ROW while it is whole and in memory,
    else empty: lookups of thousands of blocks have time for no more than one look at each.
    """

    __slots__ = (
        "checksum",
        "disk",
        "expires_at",
        "guest",
        "hash",
        "heads",
        "linear",
        "memory",
        "namespace",
        "parent",
        "parked",
        "parts",
        "pins",
        "recorded_until",
        "row",
        "shared",
        "sliding_s",
        "tenant",
        "used_at",
        "writing",
    )

    def __init__(self, namespace: Namespace, block_hash: bytes, parent: bytes, tenant: bytes = b"") -> None:
        self.namespace = namespace
        self.hash = block_hash
        self.parent = parent
        self.memory: Slot | None = None
        self.disk: Slot | None = None
        self.shared: Location | None = None
        self.heads = 0
        self.writing = 0
        self.checksum = b""
        self.parts: dict[Span, bytes] = {}
        self.pins = 0
        self.expires_at = 0.0
        self.sliding_s = 0.0
        self.recorded_until = 0.0
        self.linear = 0
        self.tenant = tenant
        self.used_at = 0
        self.guest = False
        self.row = b""
        # Set while an eviction has passed the block over because it was pinned: it is in no queue then.
        self.parked = False

    @property
    def complete(self) -> bool:
        return self.heads == self.namespace.all_heads

    @property
    def present(self) -> bool:
        """Whether the block is still anywhere; a record kept beyond that belongs to no index."""
        return self.memory is not None or self.disk is not None or self.shared is not None

    @property
    def only_shared(self) -> bool:
        """Whether the block is in the shared store alone."""
        return self.memory is None and self.disk is None and self.shared is not None
