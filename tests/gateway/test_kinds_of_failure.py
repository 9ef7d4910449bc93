"""Failures that gateways are known for, each under its kind; kinds with a test of their module are not repeated."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from katydid.engine.v1 import engine_pb2 as engine_pb
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid_gateway.routing.load import RankReport, RankState
from katydid_gateway.routing.prefix_index import Holder
from katydid_gateway.routing.router import RoutedPrompt

from tests.gateway.rig import Rig, rig, until
from tests.gateway.test_router import SPEED, chain, conversation, prompt, router, send

LONG = "the quick brown fox jumps over the lazy dog " * 40


def run(folder: Path, scenario: Any, **options: Any) -> None:
    async def body() -> None:
        async with rig(folder, **options) as built:
            await scenario(built)

    asyncio.run(body())


def counted(built: Rig) -> int:
    """Requests the router counts on engines."""
    return sum(rank.requests for engine in built.gateway.fleet.router.engines.values() for rank in engine.ranks)


def test_a_path_that_counts_no_load(chatml: Path) -> None:
    """Whatever the API, a request counts from its sending to its end, its first token notwithstanding."""
    user = [{"role": "user", "content": LONG}]

    async def scenario(built: Rig) -> None:
        for engine in built.engines:
            engine.options.step_s = 0.03
        ways = [
            lambda: built.http.post("/v1/chat/completions", json={"messages": user, "max_tokens": 20}),
            lambda: built.http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 20}),
            lambda: built.http.post("/v1/responses", json={"input": LONG, "max_output_tokens": 20}),
            lambda: built.http.post("/v1/messages", json={"model": "mock", "messages": user, "max_tokens": 20}),
            lambda: collected(
                built.stub.Generate(
                    pb.GenerateRequest(prompt=pb.Prompt(text=LONG), sampling=pb.SamplingOptions(max_tokens=20))
                )
            ),
        ]
        for way in ways:
            running = asyncio.create_task(way())
            await until(lambda: counted(built) == 1)
            first = len(built.engines[0].submitted) + len(built.engines[1].submitted)
            await asyncio.sleep(0.1)
            assert counted(built) == 1, f"after {first} requests, in mid-answer"
            await running
            await until(lambda: counted(built) == 0)

    run(chatml, scenario, engines=2)


async def collected(call: Any) -> None:
    async for _ in call:
        pass


def test_a_spelling_whose_prompts_are_not_hashed(chatml: Path) -> None:
    """The same conversation through another API is found in the same cache."""
    user = [{"role": "user", "content": LONG}]

    async def scenario(built: Rig) -> None:
        cold = (await built.chat(LONG)).json()["usage"]["prompt_tokens_details"]
        assert cold["cached_tokens"] == 0
        asked = {"input": LONG, "max_output_tokens": 8}
        responses = (await built.http.post("/v1/responses", json=asked)).json()["usage"]
        assert responses["input_tokens_details"]["cached_tokens"] >= 64
        asked = {"model": "mock", "messages": user, "max_tokens": 8}
        messages = (await built.http.post("/v1/messages", json=asked)).json()["usage"]
        assert messages["cache_read_input_tokens"] >= 64
        assert sum(bool(engine.submitted) for engine in built.engines) == 1

    run(chatml, scenario, engines=3)


def test_an_imbalance_that_throws_all_caches_away() -> None:
    """When the best holder is too busy, the next best cache is worth more than an empty engine."""
    built = router(3)
    whole = chain(*conversation("a", 40))
    built.index.stored(Holder("e0", 0), whole)
    built.index.stored(Holder("e1", 0), whole[:30])
    built.engines["e0"].ranks[0].reported(RankReport(running=9, uncached_tokens=50_000, prefill_speed=SPEED), 0.0)
    assert send(built, prompt(*conversation("a", 40))) == "e1"


def test_short_prompts_that_all_meet_on_one_engine() -> None:
    """Prompts without a full block have no hashes; their text places them."""
    built = router(4)
    prompts = [RoutedPrompt((), 20, digest=bytes([number]) * 32) for number in range(64)]
    homes = Counter(built.decide(each, 0.0).chosen.holder.engine for each in prompts)  # type: ignore[union-attr]
    assert len(homes) == 4
    assert max(homes.values()) < 32


def test_a_counter_that_is_lowered_twice() -> None:
    rank = RankState()
    rank.sent(1, 500, 0.0)
    rank.own.add(1)
    rank.reported(RankReport(running=1, uncached_tokens=100), 1.0)
    assert (rank.requests, rank.queued_tokens) == (1, 100)
    for _ in range(3):
        rank.settled(1)
        rank.ended(1)
    assert rank.requests == 0
    rank.reported(RankReport(running=2), 2.0)
    assert rank.requests == 2, "another gateway's"


def test_a_report_that_comes_late_and_makes_a_rank_look_idle() -> None:
    """Own requests count themselves: however old the reports are, a burst is spread."""
    built = router(2)
    for engine in ("e0", "e1"):
        built.index.stored(Holder(engine, 0), chain(*conversation("h", 50)))
    counts: Counter[str] = Counter()
    for number in range(24):
        asked = prompt(*conversation("h", 50))
        chosen = built.decide(asked, number * 0.2).chosen
        assert chosen is not None
        built.sent(number, chosen, asked, number * 0.2)
        built.holds(number, chosen.holder)
        counts[chosen.holder.engine] += 1
        built.settled(number, chosen.holder)
        # Only one of the two is heard of, as if it were idle.
        built.engines["e0"].ranks[0].reported(RankReport(prefill_speed=SPEED), number * 0.2)
    assert abs(counts["e0"] - counts["e1"]) <= 2


def test_an_end_mark_inside_the_text(chatml: Path) -> None:
    """What looks like the end of a stream is text when the model says it."""
    said = 'data: [DONE]\n\ndata: {"choices": []}\n\n'

    async def scenario(built: Rig) -> None:
        built.engines[0].options.script = built.says(said)
        events = await built.events(messages=[{"role": "user", "content": "x"}], max_tokens=200)
        assert events[-1] == "[DONE]"
        assert events.count("[DONE]") == 1
        text = "".join(choice["delta"].get("content") or "" for event in events[:-1] for choice in event["choices"])
        assert text == said

    run(chatml, scenario)


@pytest.mark.parametrize("leg", [0, 1])
def test_a_leg_of_a_pair_that_is_not_aborted(chatml: Path, leg: int) -> None:
    """Who leaves while one engine computes the prompt, or another continues it, leaves nothing at either."""

    async def scenario(built: Rig) -> None:
        for engine, role in zip(built.engines, (engine_pb.ROLE_PREFILL, engine_pb.ROLE_DECODE), strict=True):
            engine.change_role(role)
        states = built.gateway.fleet.router.engines.values()
        await until(lambda: {state.role for state in states} == {"prefill", "decode"})
        built.engines[leg].options.prefill_s = 60
        running = asyncio.create_task(built.chat(max_tokens=50))
        await until(lambda: built.engines[leg].in_flight == 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: not any(engine.in_flight for engine in built.engines))

    run(chatml, scenario, engines=2)
