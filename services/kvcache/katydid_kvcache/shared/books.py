"""The books of the shared store: which blocks of the index are in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from katydid_cache.records import Tier

from katydid_kvcache.blocks import Block
from katydid_kvcache.shared.manifest import Location
from katydid_kvcache.tier_books import TierCounters

__all__ = ["SharedBooks"]


class SharedBooks:
    """Blocks with a `shared` location, at most `limit` of them: of more, those known longest are forgotten,
    unless they are leased.

    `changed` is told of each one that enters (True) or leaves.
    """

    tier = Tier.SHARED

    def __init__(self, limit: int, changed: Callable[[Block, bool], None]) -> None:
        self.counters = TierCounters()
        self.bytes = 0
        self._limit = limit
        self._changed = changed
        self._known: OrderedDict[Block, None] = OrderedDict()

    @property
    def blocks(self) -> int:
        return len(self._known)

    def enter(self, block: Block, location: Location) -> None:
        """The block, which is not in the store yet, is there at `location`."""
        block.shared = location
        self._known[block] = None
        self.bytes += block.namespace.layout.block_bytes
        self._changed(block, True)
        while len(self._known) > self._limit:
            # What is leased and nowhere else stays, above the limit if need be.
            oldest = next((known for known in self._known if not (known.pins and known.only_shared)), None)
            if oldest is None:
                break
            self.counters.evictions += 1
            self.leave(oldest)

    def leave(self, block: Block, *, corrupt: bool = False) -> None:
        """The block is no longer to be looked for in the store. A block in no tier leaves the index."""
        if block.shared is None:
            return
        self.counters.corrupt += corrupt
        block.shared = None
        del self._known[block]
        self.bytes -= block.namespace.layout.block_bytes
        self._changed(block, False)
        if not block.present and block.namespace.blocks.get(block.hash) is block:
            del block.namespace.blocks[block.hash]

    def check_integrity(self) -> None:
        """Raises AssertionError when the books don't balance."""
        assert all(block.shared is not None for block in self._known), "a block is counted that is not there"
        assert self.bytes == sum(block.namespace.layout.block_bytes for block in self._known)
