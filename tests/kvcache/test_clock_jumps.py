"""The wall clock jumps by a day: blocks with a time to live go early or stay late, everything else is as before."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from katydid_cache.layout import Span
from katydid_cache.records import BlockMissReason

from tests.kvcache.inside import durably, get, key, opened, payload, put
from tests.kvcache.running import run

DAY_S = 86_400.0


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_a_jump_of_the_clock_costs_times_to_live_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    jumped = 0.0
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jumped)

    async def scenario() -> None:
        nonlocal jumped
        async with opened(tmp_path) as (cache, space):
            maintaining = asyncio.create_task(cache.maintain())
            await durably(cache, space, 1)
            put(cache, space, 2, ttl_s=3600.0)
            attachment = cache.attachments.join(space, arena=False)
            found = cache.lookup(attachment, [key(1), key(2)], Span(), 1.5)
            assert len(found.blocks) == 2
            jumped = jump_s
            await asyncio.sleep(1.2)  # maintenance has run
            assert len(cache.leases) == 1, "a lease counts by a clock that does not jump"
            assert await get(cache, space, 1) == payload(1)
            early = jump_s > 0
            assert await get(cache, space, 2) == (BlockMissReason.ABSENT if early else payload(2))
            await durably(cache, space, 3)
            put(cache, space, 4, ttl_s=3600.0)
            for name in (3, 4):
                assert await get(cache, space, name) == payload(name)
            while len(cache.leases):
                await asyncio.sleep(0.05)
            maintaining.cancel()
        async with opened(tmp_path) as (cache, space):
            assert await get(cache, space, 3) == payload(3)
            assert await get(cache, space, 1) == payload(1)

    run(scenario)
