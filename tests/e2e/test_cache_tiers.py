"""A prefix computed once is found again: in another engine's pages, in host memory, on disk, after kill -9."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from katydid_client import AsyncKatydid, CachedTokens, Completion

from tests.e2e.fleet import Fleet
from tests.e2e.load import Answer, Load, mixed_asks

pytestmark = pytest.mark.e2e

PREFIX = "You are a careful assistant. You answer in one sentence, and you say so when you do not know. ".ljust(
    128, "!"
)


async def ask(client: AsyncKatydid, prompt: str, **arguments: object) -> Completion:
    return await client.generate(prompt, max_tokens=12, temperature=0.7, seed=11, ignore_eos=True, **arguments)


async def key_for(client: AsyncKatydid, prompt: str, engine: str) -> str:
    """A prompt_cache_key whose home is `engine`; there is one as soon as the gateway has heard that nobody holds any of
    the prompt."""
    async with asyncio.timeout(60):
        for number in itertools.count():
            route = await client.explain_route(prompt, prompt_cache_key=f"key-{number}")
            if route.candidates[0].engine == engine:
                return f"key-{number}"
    raise AssertionError("unreachable")


def test_a_prefix_stored_by_one_engine_is_served_to_the_other(fleet: Fleet) -> None:
    async def scenario() -> None:
        async with AsyncKatydid(fleet.gateway.address, timeout=60) as client:
            first = await ask(client, PREFIX + "first question")
            assert first.usage.cached_tokens == 0
            await fleet.flush_cache_to_disk()
            await fleet.empty_engines()
            other = fleet.other(first.timing.engine)
            prompt = PREFIX + "second question"
            computed = await ask(client, prompt, bypass_cache=True)
            # While all are idle, an engine that was started a moment ago is everything's home.
            async with client.generate_stream("keeps an engine at work", max_tokens=3000, ignore_eos=True) as busy:
                await anext(aiter(busy))
                served = await ask(client, prompt, prompt_cache_key=await key_for(client, prompt, other))
            assert served.timing.engine == other
            assert served.usage.cached_by_tier == CachedTokens(memory=128)
            assert served.usage.cached_tokens == 128
            assert served.choices == computed.choices

    asyncio.run(scenario())


def test_evicted_blocks_come_back_from_the_cache_service(fleet: Fleet) -> None:
    """Twice as many blocks as both engines have pages: the second round finds most of them one tier below."""

    async def scenario() -> None:
        async with AsyncKatydid(fleet.gateway.address, timeout=120) as client:
            prompts = [f"{number:03d} is the number of this document. " * 40 for number in range(16)]
            first = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
            await fleet.flush_cache_to_disk()
            again = [await ask(client, prompt) for prompt in prompts]
            assert [one.choices for one in again] == [one.choices for one in first]
            assert all(one.usage.cached_tokens >= 64 * (one.usage.prompt_tokens // 64) - 1 for one in again)
            below = sum(one.usage.cached_by_tier.memory + one.usage.cached_by_tier.disk for one in again)
            assert below > 2048

    asyncio.run(scenario())


def test_kill_9_of_the_cache_service_reaches_no_answer(fleet: Fleet) -> None:
    asks = mixed_asks(40, seed=3)

    async def scenario() -> None:
        async with Load(fleet) as load, AsyncKatydid(fleet.gateway.address, timeout=60) as client:
            kept = await ask(client, "Kept: " + PREFIX)
            alone = await load.one_at_a_time(asks)
            await fleet.flush_cache_to_disk()
            before = (await fleet.cache_stats()).boot_epoch

            running = asyncio.create_task(load.all_at_once(asks))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(fleet.kvcache.kill)
            assert await running == alone
            without = await load.all_at_once(asks[:12])
            assert without == alone[:12]
            assert all(isinstance(answer, Answer) for answer in without)

            await asyncio.to_thread(fleet.kvcache.start)
            await fleet.whole()
            assert (await fleet.cache_stats()).boot_epoch != before
            await fleet.empty_engines()
            back = await ask(client, "Kept: " + PREFIX)
            assert back.usage.cached_by_tier == CachedTokens(disk=128)
            assert back.choices == kept.choices

    asyncio.run(scenario())
