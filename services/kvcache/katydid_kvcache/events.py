"""Block events: every watcher of a namespace sees a snapshot and then each change once, in order.

Changes of one turn of the loop travel together. A snapshot is made part by part, because a service may hold a million
blocks and has others to serve; changes meanwhile follow it, and may tell again what it told. A watcher that does not
keep up is cut off with an error and starts again from a snapshot: events are never dropped silently.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from katydid_cache.records import BlockChange, Snapshot, Tier, WatchEvent
from katydid_runtime.errors import OverloadedError

from katydid_kvcache.store import Change, Store

__all__ = ["EventHub"]

_PART_BLOCKS = 4096
_BACKLOG = 4096


@dataclass(slots=True, eq=False)
class _Watcher:
    identity: bytes
    queue: asyncio.Queue[list[Change]]
    behind: bool = False


class EventHub:
    """Publishes the changes of `store` (which must report to `publish`). Belongs to the loop."""

    def __init__(self, store: Store, boot_epoch: int) -> None:
        self._store = store
        self._boot_epoch = boot_epoch
        self._watchers: set[_Watcher] = set()
        self._pending: list[Change] = []

    def publish(self, change: Change) -> None:
        if not self._watchers:
            return
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._pending.append(change)

    async def watch(self, identity: bytes) -> AsyncIterator[WatchEvent]:
        """Events of one namespace, without end. Raises OverloadedError when the watcher falls behind."""
        self._deliver()  # what happened before belongs to the snapshot, not to this watcher's changes
        watcher = _Watcher(identity, asyncio.Queue(_BACKLOG))
        self._watchers.add(watcher)
        sequence = 0
        try:
            for tier, hashes, last in self._snapshot(identity):
                sequence += 1
                yield Snapshot(self._boot_epoch, sequence, tier, hashes, last)
            while True:
                changes = await watcher.queue.get()
                if watcher.behind:
                    raise OverloadedError("the watcher fell behind; watch again from a snapshot")
                for tier in {change.tier: None for change in changes}:
                    sequence += 1
                    yield self._delta(sequence, tier, changes)
        finally:
            self._watchers.discard(watcher)

    def _snapshot(self, identity: bytes) -> Iterator[tuple[Tier, bytes, bool]]:
        namespace = self._store.namespaces.get(identity)
        there = {} if namespace is None else namespace.blocks
        names = [*there]
        for start in range(0, len(names), _PART_BLOCKS):
            some = map(there.get, names[start : start + _PART_BLOCKS])
            blocks = [block for block in some if block is not None and block.complete]
            held = {
                Tier.MEMORY: [block.hash for block in blocks if block.memory is not None],
                Tier.DISK: [block.hash for block in blocks if block.disk is not None],
                Tier.SHARED: [block.hash for block in blocks if block.shared is not None],
            }
            for tier, hashes in held.items():
                if hashes:
                    yield tier, b"".join(hashes), False
        yield Tier.MEMORY, b"", True

    def _delta(self, sequence: int, tier: Tier, changes: list[Change]) -> BlockChange:
        """The net effect: what came and went within one turn shows as its last state."""
        last = {change.block.hash: change.stored for change in changes if change.tier is tier}
        stored = b"".join(block_hash for block_hash, present in last.items() if present)
        removed = b"".join(block_hash for block_hash, present in last.items() if not present)
        return BlockChange(self._boot_epoch, sequence, tier, stored, removed)

    def _deliver(self) -> None:
        pending, self._pending = self._pending, []
        for watcher in self._watchers:
            changes = [change for change in pending if change.block.namespace.identity == watcher.identity]
            if not changes:
                continue
            if watcher.queue.full():
                watcher.behind = True
            else:
                watcher.queue.put_nowait(changes)
