"""Bookkeeping after the answer: all of it is done, a tenth of the time, and what is too much is let go."""

from __future__ import annotations

import asyncio
import time

from katydid_cache.asking import Asker
from katydid_cache.layout import Span

from tests.kvcache.inside import key, opened, put
from tests.kvcache.running import MIB, run


def test_lookups_reach_the_ghosts_and_leave_the_loop_to_others() -> None:
    async def scenario() -> None:
        async with opened(memory_bytes=32 * MIB) as (cache, space):
            attachment = cache.attachments.join(space, arena=False)
            put(cache, space, 0)
            names = [key(name) for name in range(4000)]
            for _ in range(2):
                cache.lookup(attachment, names, Span(), None, Asker())
            started, turns = time.monotonic(), 0
            doing = asyncio.create_task(cache.aftermath.done())
            while not doing.done():
                await asyncio.sleep(0)
                turns += 1
            assert turns > 100, "the loop was held up"
            assert cache.store.memory.ghosts.returned(key(3))
            assert cache.store.memory.ghosts.hit_rates()[0].admit_all > 0
            assert time.monotonic() - started < 20
            assert cache.aftermath._waiting == 0, "what was done leaves room for more"

    run(scenario)


def test_what_is_too_much_is_let_go() -> None:
    async def scenario() -> None:
        async with opened() as (cache, space):
            attachment = cache.attachments.join(space, arena=False)
            for lookup in range(40):
                cache.lookup(attachment, [key(lookup * 4096 + name) for name in range(4096)], Span(), None)
            assert len(cache.aftermath._work) == 16
            assert cache.tenants.of(b"").missed_tokens == 40 * 4096 * 64, "figures miss nothing"
            cache.aftermath.close()

    run(scenario)
