"""The shared store as a tier: what goes into it, what other instances put there, and reads that never wait for long.

Every call to the store has a deadline, and a breaker stops trying while the store fails: its blocks then look absent,
lookups cost nothing and writes are shed. The index is in memory, so lookups never ask the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from katydid_cache.records import BlockMissReason, Tier
from katydid_runtime.errors import DataCorruptError
from xxhash import xxh3_128_digest

from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.memory import MemoryTier
from katydid_kvcache.policy.policy_file import SharedPolicy
from katydid_kvcache.read_speeds import ReadSpeeds
from katydid_kvcache.shared.backend import Backend, Outgoing
from katydid_kvcache.shared.breaker import Breaker
from katydid_kvcache.shared.manifest import Entry, Location
from katydid_kvcache.shared.packing import Packer
from katydid_kvcache.store import Store

__all__ = ["SharedTier"]

_FAILURES = 3
_BACKOFF_S = (1.0, 60.0)
_CLEAN_S = 300.0
_GRACE_S = 3600.0
_AT_A_TIME = 16
_CLOSE_S = 5.0

logger = logging.getLogger(__name__)


class SharedTier:
    """Keeps `store.shared` in step with `backend`. Belongs to the loop; `start` begins to follow the store's news.

    `followed` gives the namespaces whose news matter now. `timeout_s` bounds every call to the store.
    """

    def __init__(
        self,
        backend: Backend,
        store: Store,
        memory: MemoryTier,
        speeds: ReadSpeeds,
        policy: SharedPolicy,
        followed: Callable[[], Sequence[Namespace]],
        *,
        pack_bytes: int,
        queue_bytes: int,
        timeout_s: float,
        refresh_s: float,
    ) -> None:
        assert store.shared is not None
        self._backend = backend
        self._store = store
        self._books = store.shared
        self._memory = memory
        self._speeds = speeds
        self._policy = policy
        self._followed = followed
        self._timeout_s = timeout_s
        self._refresh_s = refresh_s
        self._breaker = Breaker(failures=_FAILURES, first_s=_BACKOFF_S[0], longest_s=_BACKOFF_S[1], now=time.monotonic)
        self._packer = Packer(
            self._publish,
            pack_bytes=pack_bytes,
            queue_bytes=queue_bytes,
            linger_s=refresh_s,
            sheds=self._books.counters.sheds,
        )
        self._reads = asyncio.Semaphore(_AT_A_TIME)
        self._others = asyncio.Semaphore(_AT_A_TIME)
        self._reading = 0
        self._given_up: set[tuple[bytes, bytes]] = set()
        self._look = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._small: set[asyncio.Task[None]] = set()

    @property
    def bytes_in_flight(self) -> int:
        """Bytes on their way to the store."""
        return self._packer.bytes_in_flight

    def start(self) -> None:
        self._following = asyncio.create_task(self._follow())

    def refresh(self) -> None:
        """Look for news now: somebody has joined a namespace."""
        self._look.set()

    def offer(self, block: Block) -> bool:
        """Send a complete block in memory to the store, if it is worth it and not there yet; whether it was taken."""
        if block.shared is not None or block.memory is None or not block.complete or self._packer.holds(block):
            return False
        if self._policy.admission == "second_touch" and not self._store.memory.ghosts.returned(block.hash):
            return False
        if not self._breaker.closed:
            self._books.counters.sheds["failing"] += 1
            return False
        return self._packer.take(block, self._memory.view(block), self._ends_at(block))

    async def read(self, block: Block, into: memoryview) -> BlockMissReason | None:
        """Fill `into` with a block that is in the store and check it; None, or why it can't be had."""
        async with self._reads:
            # The store's time begins with a read's turn: to wait for one says nothing of the store.
            return await self._read(block, into)

    async def _read(self, block: Block, into: memoryview) -> BlockMissReason | None:
        location = block.shared
        if location is None:
            return BlockMissReason.ABSENT
        if not self._breaker.allow():
            self._note_reach()
            return BlockMissReason.STORE_UNAVAILABLE
        started = time.monotonic()
        self._reading += 1
        at_once = self._reading
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._backend.read(location, into)
        except FileNotFoundError:
            self._succeeded()
            self._gone(block, location)
            return BlockMissReason.ABSENT
        except DataCorruptError:
            self._succeeded()
            return self._wrong(block, location)
        except (OSError, TimeoutError) as error:
            self._failed("read", error)
            return BlockMissReason.STORE_UNAVAILABLE
        finally:
            self._reading -= 1
        self._succeeded()
        self._speeds.note(Tier.SHARED, len(into), time.monotonic() - started, at_once=at_once)
        return None if xxh3_128_digest(into) == location.checksum else self._wrong(block, location)

    def _wrong(self, block: Block, location: Location) -> BlockMissReason:
        """The store has something else, or less, than was put there: the block is not looked for there again."""
        if block.shared == location:
            self._books.leave(block, corrupt=True)
        return BlockMissReason.CORRUPT

    def renew(self, block: Block) -> None:
        """A block's time has moved on: the store is to know it, where it ends blocks by itself."""
        if block.shared is not None:
            ends_at = self._ends_at(block)
            self._soon(partial(self._backend.renew, block.namespace.identity, block.hash, ends_at), "renew")

    def give_up(self, block: Block) -> None:
        """A block that may be on its way to the store was dropped by an operator: it is not to get there."""
        if self._packer.holds(block):
            self._given_up.add((block.namespace.identity, block.hash))

    def withdraw(self, namespace: Namespace, entries: Sequence[Entry]) -> None:
        """These blocks are not to be used any longer, by any instance."""
        if entries:
            self._soon(partial(self._withdraw, namespace, entries), "withdraw", anyway=True)

    async def _withdraw(self, namespace: Namespace, entries: Sequence[Entry]) -> bool:
        await self._backend.withdraw(namespace.identity, namespace.layout, entries)
        return True

    async def flush(self) -> None:
        """Wait until everything on its way has got there or been given up."""
        await self._packer.flush()

    async def close(self) -> None:
        """Publish what is on its way, for some seconds at most, and let the store go."""
        if self._following is not None:
            self._following.cancel()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._packer.flush()
                await asyncio.gather(*self._small, return_exceptions=True)
        except TimeoutError:
            self._packer.close()
        await self._backend.close()

    async def _publish(self, namespace: Namespace, pack: list[Outgoing]) -> None:
        try:
            await self._publish_wanted(namespace, [block for block in pack if self._wanted(namespace, block.entry)])
        finally:
            self._given_up.difference_update((namespace.identity, block.entry.name) for block in pack)

    def _wanted(self, namespace: Namespace, entry: Entry) -> bool:
        return (namespace.identity, entry.name) not in self._given_up

    async def _publish_wanted(self, namespace: Namespace, pack: list[Outgoing]) -> None:
        sheds = self._books.counters.sheds
        pack = await asyncio.to_thread(_intact, pack)
        if not pack:
            return
        if not self._breaker.allow():
            sheds["failing"] += len(pack)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                entries = await self._backend.publish(namespace.identity, namespace.layout, pack)
        except (OSError, TimeoutError) as error:
            sheds["too_slow" if isinstance(error, TimeoutError) else "failing"] += len(pack)
            self._failed("publish", error)
            return
        self._succeeded()
        self._books.counters.writes += len(entries)
        for entry in entries:
            if self._wanted(namespace, entry):
                self._store.adopt(namespace, entry)
        self.withdraw(namespace, [entry for entry in entries if not self._wanted(namespace, entry)])

    async def _follow(self) -> None:
        """Look for news of the namespaces in use, again and again, and remove what has ended."""
        clean_at = time.monotonic() + _CLEAN_S
        while True:
            try:
                for namespace in self._followed():
                    if not self._breaker.allow():
                        break
                    await self._news(namespace)
                if time.monotonic() >= clean_at and self._breaker.allow():
                    clean_at = time.monotonic() + _CLEAN_S
                    async with asyncio.timeout(self._timeout_s):
                        cleaned = await self._backend.clean(time.time() - _GRACE_S)
                    if cleaned:
                        self._succeeded()
            except (OSError, TimeoutError) as error:
                self._failed("news", error)
            except Exception:
                logger.exception("following the shared store failed")
            self._note_reach()
            self._look.clear()
            try:
                async with asyncio.timeout(self._refresh_s):
                    await self._look.wait()
            except TimeoutError:
                pass

    async def _news(self, namespace: Namespace) -> None:
        # The first look at a large store takes many requests: each of them has the deadline, not all together.
        news = await self._backend.news(namespace.identity, namespace.layout)
        self._succeeded()
        for entry in news:
            self._store.adopt(namespace, entry)

    def _gone(self, block: Block, location: Location) -> None:
        """A block's object has gone from the store, and with it all blocks of the same object."""
        for other in list(block.namespace.blocks.values()) if location.offset else [block]:
            if other.shared is not None and other.shared.object == location.object:
                self._books.leave(other)

    def _ends_at(self, block: Block) -> float:
        """When a block is to go from the store; 0: never."""
        if not self._policy.ttl_s:
            return block.expires_at
        ends_at = time.time() + self._policy.ttl_s
        return min(ends_at, block.expires_at) if block.expires_at else ends_at

    def _soon(self, call: Callable[[], Awaitable[bool]], what: str, *, anyway: bool = False) -> None:
        """Make a small call beside everything else, `anyway` also while the store is left alone.

        It says whether the store was asked. It takes its turn among others of its kind, for which no read is to wait: a
        chain's blocks are all renewed at once.
        """

        async def bounded() -> None:
            async with self._others:
                if not anyway and not self._breaker.closed:
                    return
                try:
                    async with asyncio.timeout(self._timeout_s):
                        asked = await call()
                    if asked:
                        self._succeeded()
                except (OSError, TimeoutError) as error:
                    self._failed(what, error)

        task = asyncio.create_task(bounded())
        self._small.add(task)
        task.add_done_callback(self._small.discard)

    def _succeeded(self) -> None:
        self._breaker.succeeded()
        self._note_reach()

    def _failed(self, what: str, error: Exception) -> None:
        was_closed = self._breaker.closed
        self._breaker.failed()
        self._note_reach()
        if was_closed and not self._breaker.closed:
            logger.error("shared store left alone for a while: %s: %s", what, error or type(error).__name__)

    def _note_reach(self) -> None:
        self._store.shared_reachable = self._breaker.closed


def _intact(pack: list[Outgoing]) -> list[Outgoing]:
    """The blocks whose copies are what was committed; the others are quarantined by whoever reads them next."""
    return [block for block in pack if xxh3_128_digest(block.payload) == block.checksum]
