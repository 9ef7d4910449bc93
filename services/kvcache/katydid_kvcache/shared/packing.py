"""Blocks on their way to the shared store: gathered into packs, bounded in bytes, shed by reason.

A block is copied out of memory when it is taken, so a slow store keeps no slot from being evicted, and what it can keep
are `queue_bytes` at most.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.shared.backend import Outgoing
from katydid_kvcache.shared.manifest import Entry

__all__ = ["Packer"]

Publish = Callable[[Namespace, list[Outgoing]], Awaitable[None]]


class Packer:
    """Gathers blocks by namespace until a pack has `pack_bytes` or is `linger_s` old, then calls `publish` with it.

    `publish` must not raise. Not more than `queue_bytes` are gathered or being published; `sheds` counts what was not
    taken because of that.
    """

    def __init__(
        self, publish: Publish, *, pack_bytes: int, queue_bytes: int, linger_s: float, sheds: Counter[str]
    ) -> None:
        self._publish = publish
        self._pack_bytes = pack_bytes
        self._queue_bytes = queue_bytes
        self._linger_s = linger_s
        self._sheds = sheds
        self._open: dict[Namespace, list[Outgoing]] = {}
        self._timers: dict[Namespace, asyncio.TimerHandle] = {}
        self._publishing: set[asyncio.Task[None]] = set()
        self._names: set[tuple[bytes, bytes]] = set()
        self.bytes_in_flight = 0

    def holds(self, block: Block) -> bool:
        """Whether the block is on its way."""
        return (block.namespace.identity, block.hash) in self._names

    def take(self, block: Block, payload: memoryview, expires_at: float) -> bool:
        """Copy a complete block and see that it is published; False when there is no room for it."""
        if self.bytes_in_flight + len(payload) > self._queue_bytes:
            self._sheds["queue_full"] += 1
            return False
        namespace = block.namespace
        entry = Entry(block.hash, block.parent, block.tenant, expires_at, block.sliding_s, None)
        pack = self._open.setdefault(namespace, [])
        pack.append(Outgoing(entry, block.checksum, block.linear, bytes(payload)))
        self._names.add((namespace.identity, block.hash))
        self.bytes_in_flight += len(payload)
        if len(pack) * len(payload) >= self._pack_bytes:
            self._seal(namespace)
        elif len(pack) == 1:
            self._timers[namespace] = asyncio.get_running_loop().call_later(self._linger_s, self._seal, namespace)
        return True

    async def flush(self) -> None:
        """Publish what is gathered, and wait until everything on its way has got there or been given up."""
        for namespace in list(self._open):
            self._seal(namespace)
        if self._publishing:
            await asyncio.wait(self._publishing)

    def close(self) -> None:
        """Give up everything on its way."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._publishing:
            task.cancel()

    def _seal(self, namespace: Namespace) -> None:
        pack = self._open.pop(namespace, None)
        if (timer := self._timers.pop(namespace, None)) is not None:
            timer.cancel()
        if pack:
            task = asyncio.create_task(self._send(namespace, pack))
            self._publishing.add(task)
            task.add_done_callback(self._publishing.discard)

    async def _send(self, namespace: Namespace, pack: list[Outgoing]) -> None:
        try:
            await self._publish(namespace, pack)
        finally:
            self.bytes_in_flight -= sum(len(block.payload) for block in pack)
            self._names.difference_update((namespace.identity, block.entry.name) for block in pack)
