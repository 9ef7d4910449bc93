"""Calls to the shared store take turns: who waits says nothing of the store, and it is told a few things at a time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from katydid_cache.records import BlockMissReason, Tier
from katydid_kvcache.shared import tier
from katydid_kvcache.shared.manifest import Entry, Location

from tests.kvcache.inside import BLOCK, get, key, opened, payload, put
from tests.kvcache.running import MIB, run
from tests.kvcache.test_shared_tier import Stuck, adopt, shared


class Slow(Stuck):
    """A store whose reads take a while, and that counts what is asked of it at a time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.at_a_time = self.most = 0

    async def _hang(self) -> None:
        self.calls += 1
        self.at_a_time += 1
        self.most = max(self.most, self.at_a_time)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.at_a_time -= 1


def test_reads_that_wait_for_their_turn_are_no_failures_of_the_store(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(**shared(tmp_path, shared_timeout_s=0.5), memory_bytes=8 * MIB) as (cache, space):
            assert cache.shared is not None
            slow = cache.shared._backend = Slow(0.1)
            adopt(cache, space, range(96))
            reads = [cache.shared.read(space.blocks[key(name)], memoryview(bytearray(BLOCK))) for name in range(96)]
            # The bytes are wrong, but all of them are read: six turns of sixteen, each well within its time.
            assert set(await asyncio.gather(*reads)) == {BlockMissReason.CORRUPT}
            assert (slow.calls, slow.most) == (96, 16)
            (speed,) = [speed for where, _, speed in cache.speeds if where is Tier.SHARED]
            assert speed > 4 * BLOCK / slow.seconds, "sixteen at a time are not as slow as one after another"

    run(scenario)


def test_many_renewals_are_told_a_few_at_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(**shared(tmp_path), memory_bytes=8 * MIB) as (cache, space):
            assert cache.shared is not None
            slow = cache.shared._backend = Slow(0.01)
            adopt(cache, space, range(100))
            for name in range(100):
                cache.shared.renew(space.blocks[key(name)])
            while slow.calls < 100 or slow.at_a_time:
                await asyncio.sleep(0.01)
            assert slow.most <= 16, "each call of a store may take a connection"

    run(scenario)


class Told(Stuck):
    """A store that notes until when its blocks are to stay."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed: list[float] = []

    async def renew(self, identity: bytes, name: bytes, expires_at: float) -> bool:
        self.renewed.append(expires_at)
        return True


def test_the_store_is_told_of_blocks_that_live_on_without_a_disk_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(**shared(tmp_path)) as (cache, space):
            assert cache.shared is not None
            told = cache.shared._backend = Told()
            now = time.time()
            cache.store.adopt(space, Entry(key(1), b"", b"", now + 1.0, 100.0, Location("p", 0, bytes(16), 0)))
            for _ in range(3):
                cache.store.touch([space.blocks[key(1)]])
            while not told.renewed:
                await asyncio.sleep(0.01)
            assert [round(expires_at - now) for expires_at in told.renewed] == [100], "and not at every use"

    run(scenario)


def test_a_client_that_goes_ends_its_own_prefetches_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(**shared(tmp_path), memory_bytes=8 * MIB) as (cache, space):
            assert cache.shared is not None
            slow = cache.shared._backend = Slow(0.02)
            adopt(cache, space, range(80))
            gone, there = (cache.attachments.join(space, arena=False) for _ in range(2))
            for attachment, names in ((gone, range(40)), (there, range(40, 60))):
                cache.prefetching.start(attachment.id, space, [key(name) for name in names], 30.0)
            cache.detach(gone)
            while cache.prefetching._tasks:
                await asyncio.sleep(0.01)
            assert 20 <= slow.calls <= 24, "all of one, and of the other what had begun"

    run(scenario)


def test_a_pack_that_was_cut_off_is_no_store_that_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(**shared(tmp_path)) as (cache, space):
            for name in range(6):
                put(cache, space, name)
            await cache.flush()
            for pack in (tmp_path / "store").rglob("*.pack"):
                pack.write_bytes(pack.read_bytes()[: -4 * BLOCK - 100])
            put(cache, space, 9)
            await cache.flush()
            for name in (*range(6), 9):
                cache.store.leave(cache.store.memory, space.blocks[key(name)])
            # One whole block, one in part, four of which nothing is left.
            assert [await get(cache, space, name) == payload(name) for name in (0, 9)] == [True, True]
            assert {await get(cache, space, name) for name in range(1, 6)} == {BlockMissReason.CORRUPT}
            assert cache.store.shared is not None
            assert cache.store.shared.counters.corrupt == 5
            assert cache.store.shared_reachable

    run(scenario)


class Unasked(Stuck):
    """A store that fails, that keeps no times, and in which nothing has ended."""

    cleaned = 0

    async def clean(self, before: float) -> int:
        self.cleaned += 1
        return 0

    async def renew(self, identity: bytes, name: bytes, expires_at: float) -> bool:
        return False


def test_what_asks_nothing_of_the_store_is_no_sign_that_it_works(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(**shared(tmp_path)) as (cache, space):
            assert cache.shared is not None
            cache.shared._backend = Unasked(OSError("down"))
            adopt(cache, space, range(4))
            for name in range(3):
                assert cache.store.shared_reachable
                assert await get(cache, space, name) is BlockMissReason.STORE_UNAVAILABLE
                cache.shared.renew(space.blocks[key(3)])
                await asyncio.gather(*cache.shared._small)
            assert not cache.store.shared_reachable, "three failures in a row"

    run(scenario)


def test_no_read_waits_for_what_hangs_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "_CLOSE_S", 0.1)

    async def scenario() -> None:
        async with opened(**shared(tmp_path, shared_timeout_s=60.0)) as (cache, space):
            assert cache.shared is not None
            hung = cache.shared._backend = Stuck()
            adopt(cache, space, (1,))
            for _ in range(40):
                cache.shared.withdraw(space, [Entry(key(2), b"", b"", 0.0, 0.0, Location("p", 0, bytes(16), 0))])
            while hung.calls < 16:
                await asyncio.sleep(0.01)
            cache.shared._backend = Slow(0.0)
            async with asyncio.timeout(10.0):
                read = await cache.shared.read(space.blocks[key(1)], memoryview(bytearray(BLOCK)))
            assert read is BlockMissReason.CORRUPT, "it was asked for, and the store has other bytes"

    run(scenario)


def test_a_clean_up_of_nothing_is_no_sign_that_the_store_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "_CLEAN_S", 0.0)

    async def scenario() -> None:
        async with opened(**shared(tmp_path, shared_refresh_s=0.01)) as (cache, space):
            assert cache.shared is not None
            asked = cache.shared._backend = Unasked(OSError("down"))
            adopt(cache, space, range(3))
            for name in range(3):
                cleaned = asked.cleaned
                while asked.cleaned == cleaned:
                    await asyncio.sleep(0.01)
                assert await get(cache, space, name) is BlockMissReason.STORE_UNAVAILABLE
            assert not cache.store.shared_reachable, "three failures in a row"

    run(scenario)
