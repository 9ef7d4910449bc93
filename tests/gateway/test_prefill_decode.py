"""Prompts computed on one engine and continued on another: the same answer, and what happens when either side dies."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from katydid.engine.v1 import engine_pb2 as pb
from katydid_gateway.routing.cost import TierSpeeds
from katydid_gateway.routing.load import EngineState, RankReport, RankState
from katydid_gateway.routing.pairs import after_hand_off, worth_following
from katydid_gateway.routing.router import Router
from katydid_gateway.routing.tier_index import CacheTier
from katydid_runtime.block_hash import pack_ids

from tests.gateway.mock_options import MockOptions
from tests.gateway.rig import Rig, rig, until
from tests.gateway.test_resume import seeded, texts
from tests.gateway.test_router import SPEED, conversation, prompt

USER = [{"role": "user", "content": "hello there"}]
ASKED = {"messages": USER, "max_tokens": 40, "seed": 5, "stream_options": {"include_usage": True}}
PREFILL, DECODE, BOTH = pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_BOTH
# More than a chunk of a GPU engine.
LONG_PROMPTS = MockOptions(kv_cache_attached=True, max_model_tokens=16384)
NAMES = {PREFILL: "prefill", DECODE: "decode", BOTH: "both"}


def run(folder: Path, scenario: Any, roles: Sequence[pb.Role], *, step_s: float = 0.005, **settings: Any) -> None:
    async def body() -> None:
        async with rig(folder, engines=len(roles), **settings) as built:
            for engine, role in zip(built.engines, roles, strict=True):
                engine.options.step_s, engine.options.script = step_s, seeded
                engine.change_role(role)
            known = built.gateway.fleet.router.engines
            await until(lambda: [state.role for state in known.values()] == [NAMES[role] for role in roles])
            await scenario(built)

    asyncio.run(body())


@pytest.mark.parametrize("choices", [1, 3])
def test_an_answer_is_the_same_over_two_engines(chatml: Path, choices: int, tmp_path: Path) -> None:
    async def scenario(built: Rig) -> None:
        giver, taker = built.engines
        split = await built.events(**ASKED, n=choices)
        (whole,) = giver.submitted
        assert (whole.sampling.max_tokens, whole.sampling.n, whole.hold.seconds) == (1, choices, 30)
        assert [len(message.generated_ids) for message in taker.submitted] == [4] * choices
        assert {message.sampling.max_tokens for message in taker.submitted} == {40}
        assert not giver.aborted
        assert split[-1] == "[DONE]"
        assert split[-2]["usage"]["completion_tokens"] == 40 * choices
        for engine in built.engines:
            engine.change_role(BOTH)
        states = built.gateway.fleet.router.engines.values()
        await until(lambda: all(state.role == "both" for state in states))
        assert texts(await built.events(**ASKED, n=choices)) == texts(split)
        metrics = (await built.http.get("/metrics")).text
        assert f'katydid_gateway_handed_off_choices_total{{engine="engine-0"}} {choices}.0' in metrics
        assert "katydid_gateway_failed_requests_total{" not in metrics

    trace = tmp_path / "trace.jsonl"
    run(chatml, scenario, [PREFILL, DECODE], trace_file=str(trace))
    spans = [json.loads(line)["name"] for line in trace.read_text().splitlines()]
    assert spans.count("gateway.hand_off") == choices
    assert "gateway.resume" not in spans


def test_the_second_engine_fetches_while_the_first_computes(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        giver, taker = built.engines
        short = await built.events(**ASKED)
        assert not any(message.fetch_only for message in taker.submitted)
        giver.options.prefill_s = 0.2
        long = {**ASKED, "messages": [{"role": "user", "content": "hello there " * 5000}]}
        answering = asyncio.create_task(built.events(**long))
        await until(lambda: taker.in_flight == 1)
        fetch, prompts = taker.submitted[-1], giver.submitted[-1]
        assert fetch.fetch_only
        assert (fetch.prompt_ids, fetch.cache_salt, fetch.generated_ids) == (
            prompts.prompt_ids,
            prompts.cache_salt,
            b"",
        )
        assert fetch.blocks_within.seconds == 600  # as long as an engine allows
        assert not prompts.HasField("blocks_within")
        assert (await answering)[-2]["usage"]["completion_tokens"] == 40
        assert taker.aborted == [fetch.request]
        goes_on = taker.submitted[-1]
        assert (len(goes_on.generated_ids), goes_on.fetch_only) == (4, False)
        # Its last blocks may be on their way to the cache still.
        assert 0 < goes_on.blocks_within.ToNanoseconds() <= 2e9
        assert short[-2]["usage"]["completion_tokens"] == 40
        # What reads no cache waits for no blocks.
        await built.events(**ASKED, bypass_cache=True)
        assert len(taker.submitted[-1].generated_ids) == 4
        assert not taker.submitted[-1].HasField("blocks_within")

    run(chatml, scenario, [PREFILL, DECODE], options=LONG_PROMPTS)


def test_a_fetch_ends_with_its_request(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        giver, taker = built.engines
        giver.options.prefill_s = 60
        long = {**ASKED, "messages": [{"role": "user", "content": "hello there " * 5000}]}
        answering = asyncio.create_task(built.events(**long))
        await until(lambda: taker.in_flight == 1)
        answering.cancel()
        await until(lambda: not taker.in_flight and not giver.in_flight)

    run(chatml, scenario, [PREFILL, DECODE], options=LONG_PROMPTS)


def test_what_ends_with_its_first_token_goes_nowhere_else(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        giver, taker = built.engines
        one = await built.chat(max_tokens=1, seed=5)
        assert one.json()["choices"][0]["finish_reason"] == "length"
        giver.options.script = built.says("")
        stopped = await built.chat(max_tokens=40, min_tokens=9)
        assert stopped.json()["choices"][0]["finish_reason"] == "stop"
        assert giver.submitted[-1].sampling.min_tokens == 1
        assert not taker.submitted

    run(chatml, scenario, [PREFILL, DECODE])


def test_the_first_token_comes_before_the_second_engine_has_any(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        _, taker = built.engines
        taker.options.prefill_s = 60
        first = asyncio.Event()

        async def read() -> None:
            body = {"model": "mock", "stream": True, **ASKED}
            async with built.http.stream("POST", "/v1/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if '"content":"' in line and '"content":""' not in line:
                        first.set()

        reading = asyncio.create_task(read())
        await asyncio.wait_for(first.wait(), 10)
        await until(lambda: taker.in_flight == 1)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    run(chatml, scenario, [PREFILL, DECODE])


@pytest.mark.parametrize("victim", [0, 2])
def test_either_side_may_die(chatml: Path, victim: int) -> None:
    """The prompt's engine before the first token, the answer's in mid-stream: with roles, and with what is left."""

    async def scenario(built: Rig) -> None:
        whole = await built.events(**ASKED)
        built.engines[0].options.prefill_s = built.engines[1].options.prefill_s = 0.3
        for engine in built.engines[2:]:
            engine.options.step_s = 0.02
        interrupted = asyncio.create_task(built.events(**ASKED))
        side = built.engines[:2] if victim == 0 else built.engines[2:]
        await until(lambda: any(engine.in_flight for engine in side))
        dead = next(engine for engine in side if engine.in_flight)
        await dead.stop()
        assert texts(await interrupted) == texts(whole)
        await until(lambda: built.gateway.fleet.healthy == 3)
        left = next(engine for engine in side if engine is not dead)
        await left.stop()
        await until(lambda: built.gateway.fleet.healthy == 2)
        assert texts(await built.events(**ASKED)) == texts(whole)

    run(chatml, scenario, [PREFILL, PREFILL, DECODE, DECODE])


def test_a_choice_that_was_handed_off_does_not_begin_again_with_the_others(chatml: Path) -> None:
    """The first engine dies between the first tokens of two choices: one goes on already, the other is still owed."""

    async def scenario(built: Rig) -> None:
        giver, taker = built.engines
        whole = await built.events(**ASKED, n=2)
        giver.options.deaf = True
        split = asyncio.create_task(built.events(**ASKED, n=2))
        await until(lambda: len(giver.submitted) == 2)
        asked = giver.submitted[-1]
        frame = pb.SessionResponse(first_tokens=[pb.FirstToken(request=asked.request)])
        token = seeded(array("I", asked.prompt_ids), asked.sampling, 0)[:1]
        columns = {"requests": [asked.request], "counts": [1], "tokens": token}
        frame.tokens.MergeFrom(pb.TokenColumns(**{name: pack_ids(array("I", ids)) for name, ids in columns.items()}))
        frame.finishes.add(request=asked.request, reason=pb.FINISH_REASON_LENGTH)
        giver.say(frame)
        await until(lambda: taker.in_flight == 1)
        await giver.stop()
        assert texts(await asyncio.wait_for(split, 10)) == texts(whole)

    run(chatml, scenario, [PREFILL, DECODE], step_s=0.02)


def fleet(*engines: tuple[str, str, str], speed: float = SPEED) -> Router:
    """Engines of (name, role, near instance), all at one cache service."""
    built = Router()
    for name, role, near in engines:
        built.engines[name] = EngineState(
            name,
            [RankState(RankReport(prefill_speed=speed))],
            block_bytes=10_000_000,
            kv_cache_attached=True,
            excluded="",
            role=role,
            near=near,
        )
    return built


def test_a_prompt_of_one_chunk_is_not_followed() -> None:
    giver, taker = fleet(("p", "prefill", "a"), ("d", "decode", "a")).engines.values()
    assert [worth_following(giver, taker, blocks, 100) for blocks in (228, 229)] == [False, True]
    taker.kv_cache_attached = False
    assert not worth_following(giver, taker, 229, 100)


def test_pairs_are_chosen_jointly() -> None:
    built = fleet(("p0", "prefill", "a"), ("p1", "prefill", "b"), ("d0", "decode", "b"))
    built.speeds.bytes_per_s[CacheTier.MEMORY], built.speeds.bytes_per_s[CacheTier.SHARED] = 1e10, 2e9
    asked = prompt(*conversation("a", 100))
    chosen = built.decide(asked, 0.0).chosen
    assert chosen is not None
    assert chosen.partner is not None
    assert (chosen.holder.engine, chosen.partner.engine) == ("p1", "d0")
    assert chosen.hand_off_s == pytest.approx(100 * 1e7 / 1e10 + 10 / SPEED)
    # A wait at p1 that is longer than the network takes.
    built.engines["p1"].ranks[0].report = RankReport(uncached_tokens=20_000, prefill_speed=SPEED)
    chosen = built.decide(asked, 0.0).chosen
    assert chosen is not None
    assert (chosen.holder.engine, chosen.hand_off_s) == ("p0", pytest.approx(100 * 1e7 / 2e9 + 10 / SPEED))


def test_roles_are_said_and_the_last_engine_serves_whatever_its_role() -> None:
    built = fleet(("p0", "prefill", ""), ("d0", "decode", ""))
    asked = prompt(*conversation("a", 4))
    why = {c.holder.engine: c.excluded for c in built.decide(asked, 0.0).candidates}
    assert why == {"p0": "", "d0": "continues prompts only"}
    why = {c.holder.engine: c.excluded for c in built.decide(asked, 0.0, after="p0").candidates}
    assert why == {"d0": "", "p0": "computes prompts only"}
    alone = built.decide(asked, 0.0, without=("d0",)).chosen
    assert alone is not None
    assert (alone.holder.engine, alone.partner) == ("p0", None)
    again = built.decide(asked, 0.0, without=("p0",)).chosen
    assert again is not None
    assert again.holder.engine == "d0"


def test_without_a_cache_service_between_them_the_prompt_is_computed_again() -> None:
    built = fleet(("p0", "prefill", "a"), ("d0", "decode", "a"))
    giver, taker = built.engines.values()
    giver.kv_cache_attached = False
    terms = after_hand_off(giver, taker, taker.ranks[0], 6400, 100, 20, TierSpeeds())
    assert (terms.fetch_s, terms.uncached_tokens) == (0, 6400 - 20 * 64)
