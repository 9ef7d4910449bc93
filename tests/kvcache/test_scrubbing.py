"""The scrubber goes through all tiers in the background and takes bad copies out, whoever asks or not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from katydid_cache.layout import Span
from katydid_kvcache.cache import Cache

from tests.kvcache.inside import durably, flip, get, key, opened, payload, put
from tests.kvcache.running import run


async def passes(cache: Cache, count: int) -> None:
    scrubbing = asyncio.create_task(cache.scrubber.run(1e9))
    while cache.scrubber.passes < count:
        await asyncio.sleep(0.01)
    scrubbing.cancel()


def test_bad_copies_are_found_unread_and_good_ones_stay(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            for name in range(12):
                await durably(cache, space, name)
            for name in (2, 5):
                cache.memory.view(space.blocks[key(name)])[100] ^= 1
            for name in (5, 7):
                slot = space.blocks[key(name)].disk
                assert slot is not None
                flip(tmp_path, slot.slab, slot.index, 300)
            await passes(cache, 1)
            assert cache.store.disk is not None
            assert (cache.store.memory.counters.corrupt, cache.store.disk.counters.corrupt) == (2, 2)
            assert cache.quarantined == 4
            assert (cache.scrubber.blocks, cache.scrubber.corrupt) == (12, 3)
            two, seven = space.blocks[key(2)], space.blocks[key(7)]
            assert (two.memory is None, two.disk is None) == (True, False)
            assert (seven.memory is None, seven.disk is None) == (False, True)
            assert key(5) not in space.blocks
            for name in (0, 2, 7):
                assert await get(cache, space, name) == payload(name)

    run(scenario)


def test_it_keeps_to_its_rate_and_leaves_unfinished_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rested: list[float] = []

    async def sleep(seconds: float) -> None:
        rested.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr("katydid_kvcache.scrubbing.asyncio", SimpleNamespace(sleep=sleep))

    async def scenario() -> None:
        async with opened() as (cache, space):
            for name in range(20):
                put(cache, space, name)
            put(cache, space, 99, heads=Span(0, 1))
            scrubbing = asyncio.create_task(cache.scrubber.run(100 * space.slot_bytes))
            while not cache.scrubber.passes:
                await asyncio.sleep(0)
            scrubbing.cancel()
            assert rested[:20] == [pytest.approx(0.01)] * 20, "after each block, as long as its bytes may take"
            assert (cache.scrubber.blocks, cache.scrubber.bytes) == (20, 20 * space.slot_bytes)

    run(scenario)
