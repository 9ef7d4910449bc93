"""The shared store as a tier of running caches: found by others, read with checks, and no harm when it is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from katydid_cache.layout import BlockLayout, Span
from katydid_cache.records import BlockMissReason, PutStatus, Tier
from katydid_kvcache.blocks import Namespace
from katydid_kvcache.cache import Cache
from katydid_kvcache.shared.backend import Backend, Outgoing
from katydid_kvcache.shared.manifest import Entry, Location

from tests.kvcache.inside import BLOCK, get, key, opened, payload, put
from tests.kvcache.running import IDENTITY, MIB, run

FAST = {"shared_refresh_s": 0.02, "shared_timeout_s": 10}


def shared(tmp_path: Path, **more: object) -> dict[str, object]:
    """Settings of a cache that sends every block to a folder that stands for the shared store."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("tiers: {shared: {admission: all}}\n")
    return {"shared_url": f"file://{tmp_path}/store", "policy_file": str(policy), **FAST, **more}


def found(cache: Cache, space: Namespace, names: Sequence[int]) -> list[Tier]:
    """The tier of each block of the longest prefix."""
    attachment = cache.attachments.join(space, arena=False)
    try:
        runs = cache.lookup(attachment, [key(name) for name in names], Span(), None).runs
        return [run.tier for run in runs for _ in range(run.blocks)]
    finally:
        cache.attachments.leave(attachment)


async def known(cache: Cache, space: Namespace, blocks: int) -> None:
    """Wait until a cache knows of so many blocks in the shared store."""
    attachment = cache.attachments.join(space, arena=False)
    deadline = time.monotonic() + 10
    while cache.store.shared is None or cache.store.shared.blocks != blocks:
        assert time.monotonic() < deadline, cache.store.shared and cache.store.shared.blocks
        await asyncio.sleep(0.01)
    cache.attachments.leave(attachment)


def test_another_instance_finds_reads_and_keeps_the_blocks(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = shared(tmp_path)
        async with opened(**settings) as (one, space), opened(tmp_path / "disk", **settings) as (other, there):
            for name in (1, 2, 3):
                assert put(one, space, name, tenant=b"t" * 16).status is PutStatus.STORED
            await known(other, there, 3)
            assert found(other, there, (1, 2, 3, 4)) == [Tier.SHARED] * 3
            assert [await get(other, there, name) for name in (1, 2, 3)] == [payload(name) for name in (1, 2, 3)]
            assert found(other, there, (1, 2, 3)) == [Tier.MEMORY] * 3
            assert there.blocks[key(1)].tenant == b"t" * 16
            await other.flush()
            other.store.leave(other.store.memory, there.blocks[key(1)])
            assert found(other, there, (1,)) == [Tier.DISK]
            assert one.store.shared is not None
            assert one.store.shared.counters.writes == 3
            assert one.store.shared.bytes == 3 * BLOCK
            one.store.leave(one.store.memory, space.blocks[key(2)])
            assert found(one, space, (1, 2, 3)) == [Tier.MEMORY, Tier.SHARED, Tier.MEMORY]

    run(scenario)


def test_a_second_use_sends_a_block_down_when_the_first_does_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(shared_url=f"file://{tmp_path}/store", **FAST) as (cache, space):
            put(cache, space, 1)
            put(cache, space, 2)
            found(cache, space, (1, 2))
            await cache.flush()
            assert cache.store.shared is not None
            assert cache.store.shared.blocks == 0
            found(cache, space, (1,))
            await cache.aftermath.done()
            await cache.flush()
            assert space.blocks[key(1)].shared is not None
            assert space.blocks[key(2)].shared is None

    run(scenario)


def test_wrong_bytes_in_the_store_are_never_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(**shared(tmp_path)) as (cache, space):
            for name in range(8):
                put(cache, space, name)
            await cache.flush()
            for pack in (tmp_path / "store").rglob("*.pack"):
                data = bytearray(pack.read_bytes())
                for at in range(len(data) - 8 * BLOCK + 100, len(data), BLOCK):
                    data[at] ^= 4
                pack.write_bytes(data)
            for name in range(8):
                cache.store.leave(cache.store.memory, space.blocks[key(name)])
                assert await get(cache, space, name) is BlockMissReason.CORRUPT
                assert await get(cache, space, name) is BlockMissReason.ABSENT
            assert cache.store.shared is not None
            assert cache.store.shared.counters.corrupt == 8

    run(scenario)


def test_a_pack_that_has_gone_is_a_miss_for_all_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(**shared(tmp_path)) as (cache, space):
            for name in range(4):
                put(cache, space, name)
            await cache.flush()
            for name in range(4):
                cache.store.leave(cache.store.memory, space.blocks[key(name)])
            for pack in (tmp_path / "store").rglob("*.pack"):
                pack.unlink()
            assert await get(cache, space, 0) is BlockMissReason.ABSENT
            assert not space.blocks

    run(scenario)


def test_what_an_operator_evicts_is_gone_for_every_instance(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = shared(tmp_path)
        async with opened(**settings) as (one, space), opened(**settings) as (other, there):
            put(one, space, 1)
            put(one, space, 2)
            await known(other, there, 2)
            assert await other.evict(there.identity, [key(1)]) == 1
            await known(one, space, 1)
            assert space.blocks[key(2)].shared is not None
        async with opened(**settings) as (fresh, here):
            await known(fresh, here, 1)
            assert found(fresh, here, (2,)) == [Tier.SHARED]

    run(scenario)


def test_a_block_withdrawn_while_it_is_read_is_a_miss(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(**shared(tmp_path)) as (cache, space):
            put(cache, space, 1)
            await cache.flush()
            cache.store.leave(cache.store.memory, space.blocks[key(1)])
            assert cache.shared is not None
            backend, begun, go_on = cache.shared._backend, asyncio.Event(), asyncio.Event()

            async def read(location: Location, into: memoryview) -> None:
                await type(backend).read(backend, location, into)
                begun.set()
                await go_on.wait()

            backend.read = read  # type: ignore[method-assign]
            reading = asyncio.create_task(get(cache, space, 1))
            await begun.wait()
            cache.store.adopt(space, Entry(key(1), b"", b"", 0.0, 0.0, None))
            go_on.set()
            assert await reading is BlockMissReason.ABSENT
            assert not space.blocks
            assert put(cache, space, 1).status is PutStatus.STORED

    run(scenario)


class Stuck(Backend):
    """A store that answers nothing, or fails at once."""

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error
        self.calls = 0

    async def _hang(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()

    async def publish(self, identity: bytes, layout: BlockLayout, blocks: Sequence[Outgoing]) -> list[Entry]:
        await self._hang()
        return []

    async def withdraw(self, identity: bytes, layout: BlockLayout, entries: Sequence[Entry]) -> None:
        await self._hang()

    async def news(self, identity: bytes, layout: BlockLayout) -> list[Entry]:
        return []

    async def read(self, location: Location, into: memoryview) -> None:
        await self._hang()

    async def renew(self, identity: bytes, name: bytes, expires_at: float) -> bool:
        await self._hang()
        return True

    async def clean(self, before: float) -> int:
        return 0

    async def close(self) -> None:
        pass


def adopt(cache: Cache, space: Namespace, names: Sequence[int]) -> None:
    for name in names:
        cache.store.adopt(space, Entry(key(name), b"", b"", 0.0, 0.0, Location("p", 100, bytes(16), 0)))


def test_a_store_that_hangs_costs_its_timeout_three_times_and_then_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(**shared(tmp_path, shared_timeout_s=0.3)) as (cache, space):
            assert cache.shared is not None
            stuck = cache.shared._backend = Stuck()
            adopt(cache, space, range(6))
            for name in range(3):
                assert await get(cache, space, name) is BlockMissReason.STORE_UNAVAILABLE
            assert stuck.calls == 3
            assert found(cache, space, range(6)) == [], "what can't be had is not promised"
            assert await get(cache, space, 4) is BlockMissReason.ABSENT
            assert stuck.calls == 3, "nor asked for"
            assert put(cache, space, 4).status is PutStatus.STORED, "and may be written anew"
            assert await get(cache, space, 4) == payload(4)
            cache.shared._backend = Stuck(OSError("still broken"))
            await asyncio.sleep(1.1)
            assert found(cache, space, (0,)) == [Tier.SHARED], "after a while it is tried again"
            assert await get(cache, space, 0) is BlockMissReason.STORE_UNAVAILABLE
            assert found(cache, space, (0,)) == []

    run(scenario)


def test_a_slow_store_sheds_writes_by_reason_and_holds_up_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(**shared(tmp_path, shared_timeout_s=0.3, shared_queue_bytes=MIB, shared_pack_bytes=MIB)) as (
            cache,
            space,
        ):
            assert cache.shared is not None
            assert cache.store.shared is not None
            sheds = cache.store.shared.counters.sheds
            cache.shared._backend = Stuck()
            for name in range(50):
                assert put(cache, space, name).status is PutStatus.STORED
            assert cache.shared.bytes_in_flight == MIB
            assert sheds == {"queue_full": 50 - MIB // BLOCK}
            while cache.shared.bytes_in_flight:
                await asyncio.sleep(0.02)
            assert sheds["too_slow"] == MIB // BLOCK

    run(scenario)


def test_a_prefetch_ends_at_its_deadline_and_with_its_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(**shared(tmp_path, shared_timeout_s=20)) as (cache, space):
            assert cache.shared is not None
            stuck = cache.shared._backend = Stuck()
            adopt(cache, space, range(12))
            names = [key(name) for name in range(12)]
            started = time.monotonic()
            assert await cache.prefetching.fetch(space, names, 0.1) == []
            assert time.monotonic() - started < 15, "it waited for the store"
            assert stuck.calls == 4
            attachment = cache.attachments.join(space, arena=False)
            blocks, eta_s = cache.prefetching.start(attachment.id, space, names, 60.0)
            assert blocks == 12
            assert eta_s > 0
            cache.detach(attachment)
            await asyncio.sleep(0.01)
            assert not cache.prefetching._tasks
            for promotion in list(cache.reader._promotions.values()):
                promotion.cancel()
            await asyncio.sleep(0.01)

    run(scenario)


def test_evicting_a_whole_namespace_holds_up_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(**shared(tmp_path)) as (cache, space):
            adopt(cache, space, range(3000))
            turns = 0

            async def others() -> None:
                nonlocal turns
                while True:
                    await asyncio.sleep(0)
                    turns += 1

            beside = asyncio.create_task(others())
            assert await cache.evict(IDENTITY, []) == 3000
            beside.cancel()
            assert turns >= 5
            assert not space.blocks

    run(scenario)


@pytest.mark.parametrize("when", ["gathered", "being published"])
def test_what_an_operator_evicts_on_its_way_does_not_come_back(tmp_path: Path, when: str) -> None:
    async def scenario() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()
        options = shared(tmp_path, shared_refresh_s=60.0)
        async with opened(**options) as (one, space), opened(**options) as (other, there):
            assert one.shared is not None
            backend = one.shared._backend

            async def publish(identity: bytes, layout: BlockLayout, blocks: Sequence[Outgoing]) -> list[Entry]:
                begun.set()
                await go_on.wait()
                return await type(backend).publish(backend, identity, layout, blocks)

            backend.publish = publish  # type: ignore[method-assign]
            for name in (1, 2):
                put(one, space, name)
            flushing = None
            if when == "being published":
                flushing = asyncio.create_task(one.flush())
                await begun.wait()
            assert await one.evict(space.identity, [key(1)]) == 1
            go_on.set()
            await (flushing or one.flush())
            await one.shared.close()
            assert found(one, space, [1]) == []
            assert found(one, space, [2]) == [Tier.MEMORY]
            other.shared.refresh()
            await known(other, there, 1)
            assert found(other, there, [2]) == [Tier.SHARED]

    run(scenario)
