"""Blocks that an operator keeps: pinned for a time in the tiers where they are, whoever comes and goes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.store import Store

__all__ = ["OperatorPins"]


class OperatorPins:
    """One pin a block of `store` at most. `expire` must be called now and then."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._until: dict[Block, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def keep(self, namespace: Namespace, hashes: Sequence[bytes], hold_s: float) -> int:
        """Keep the complete blocks among `hashes` for `hold_s` from now, 0 ends it; how many there were."""
        blocks = [namespace.blocks.get(block_hash) for block_hash in hashes]
        found = [block for block in blocks if block is not None and block.complete]
        for block in found:
            if hold_s and block not in self._until:
                self._store.pin([block])
            if hold_s:
                self._until[block] = time.monotonic() + hold_s
            elif self._until.pop(block, None) is not None:
                self._store.unpin([block])
        return len(found)

    def expire(self) -> None:
        """Let go what was kept for long enough."""
        now = time.monotonic()
        for block in [block for block, until in self._until.items() if until <= now]:
            del self._until[block]
            self._store.unpin([block])
