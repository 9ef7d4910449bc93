"""An answer whose engine dies goes on, token for token, on another; and the cases in which it must not."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from katydid.engine.v1 import engine_pb2 as engine_pb
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid_gateway.engines.submission import Submission
from katydid_gateway.requests import RequestOptions, Sampling
from katydid_runtime.errors import EngineLostError
from katydid_runtime.rpc_errors import from_rpc_error

from tests.gateway.mock_engine import MockEngine
from tests.gateway.rig import Rig, rig, until

USER = [{"role": "user", "content": "hello there"}]


def seeded(prompt: array[int], sampling: engine_pb.SamplingParams, choice: int) -> list[int]:
    """What a choice says depends on its own seed and the position alone, as an engine's sampling does."""
    seed = sampling.seed + choice
    return [prompt[(seed * 7 + place * (seed + 1)) % len(prompt)] for place in range(sampling.max_tokens)]


def run(folder: Path, scenario: Any, *, step_s: float = 0.01, **options: Any) -> None:
    async def body() -> None:
        async with rig(folder, **options) as built:
            for engine in built.engines:
                engine.options.step_s, engine.options.script = step_s, seeded
            await scenario(built)

    asyncio.run(body())


async def kill(built: Rig, tokens: int) -> MockEngine:
    """Stop the engine that answers, once every choice has so many tokens."""
    victim = await far_enough(built, tokens)
    await victim.stop()
    return victim


async def far_enough(built: Rig, tokens: int) -> MockEngine:
    """The engine that answers, once every choice has so many tokens."""

    def reached() -> bool:
        answers = built.gateway.generator._answers
        running = [answer for answer in answers if not answer._done]
        return any(all(choice.tokens >= tokens for choice in answer._choices) for answer in running)

    await until(reached)
    return next(engine for engine in built.engines if engine.in_flight)


def texts(events: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


@pytest.mark.parametrize("choices", [1, 3])
def test_a_stream_goes_on_token_for_token(chatml: Path, choices: int, tmp_path: Path) -> None:
    async def scenario(built: Rig) -> None:
        asked = {
            "messages": USER,
            "max_tokens": 60,
            "seed": 11,
            "n": choices,
            "logprobs": True,
            "stream_options": {"include_usage": True},
        }
        whole = await built.events(**asked)
        interrupted = asyncio.create_task(built.events(**asked))
        victim = await kill(built, 8)
        events = await interrupted
        assert events[-1] == "[DONE]"
        assert texts(events) == texts(whole)
        reasons = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
        assert [reason for reason in reasons if reason] == ["length"] * choices
        assert events[-2]["usage"]["completion_tokens"] == 60 * choices
        logprobs = [
            sum(len((choice.get("logprobs") or {"content": []})["content"]) for choice in event["choices"])
            for event in events[:-1]
            if event["choices"]
        ]
        assert sum(logprobs) == 60 * choices
        other = next(engine for engine in built.engines if engine is not victim)
        resumed = [message for message in other.submitted if message.generated_ids]
        assert [message.sampling.n for message in resumed] == [1] * choices
        assert {message.sampling.seed for message in resumed} == {11 + index for index in range(choices)}
        assert len({message.request_id for message in resumed}) == choices
        metrics = (await built.http.get("/metrics")).text
        name = f"engine-{built.engines.index(victim)}"
        assert f'katydid_gateway_resumed_choices_total{{engine="{name}"}} {choices}.0' in metrics

    trace = tmp_path / "trace.jsonl"
    run(chatml, scenario, engines=2, trace_file=str(trace))
    spans = [json.loads(line) for line in trace.read_text().splitlines()]
    resumes = [span for span in spans if span["name"] == "gateway.resume"]
    assert len(resumes) == choices
    requests = {span["span_id"]: span for span in spans if span["name"] == "gateway.request"}
    for span in resumes:
        assert requests[span["parent"]]["attributes"]["request.resumes"] == 1
        assert span["attributes"]["resume.generated_tokens"] >= 8


def test_it_goes_on_over_grpc_too(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        asked = pb.ChatRequest(
            messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hello there")],
            sampling=pb.SamplingOptions(max_tokens=50, seed=3),
        )
        whole = [event async for event in built.stub.Chat(asked)]

        async def collect() -> list[Any]:
            return [event async for event in built.stub.Chat(asked)]

        interrupted = asyncio.create_task(collect())
        await kill(built, 5)
        events = await interrupted
        assert b"".join(event.token_ids for event in events) == b"".join(event.token_ids for event in whole)
        assert events[-1].usage.completion_tokens == 50

    run(chatml, scenario, engines=2)


def test_a_choice_goes_on_at_its_own_seed_and_does_not_ask_for_the_prompt_again() -> None:
    sampling = Sampling(seed=2**64 - 1, max_tokens=9, n=3, logprobs=0, prompt_logprobs=True)
    whole = Submission("r", b"\1\0\0\0", sampling, RequestOptions(), None)
    begun, owed = whole.continued(2, b"\5\0\0\0"), whole.continued(1, b"")
    assert (begun.request_id, begun.sampling.seed, begun.sampling.n) == ("r.2", 1, 1)
    assert (begun.sampling.prompt_logprobs, owed.sampling.prompt_logprobs) == (False, True)
    assert (begun.reads_cache, owed.reads_cache, whole.reads_cache) == (True, False, False)


def test_finished_choices_are_not_sent_again(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        for engine in built.engines:
            engine.options.script = lambda prompt, sampling, choice: seeded(prompt, sampling, choice)[
                : 4 if (sampling.seed + choice) % 2 else 60
            ]
        interrupted = asyncio.create_task(built.events(messages=USER, max_tokens=60, seed=2, n=2))
        victim = await kill(built, 4)
        events = await interrupted
        assert events[-1] == "[DONE]"
        other = next(engine for engine in built.engines if engine is not victim)
        assert [message.sampling.seed for message in other.submitted] == [2]

    run(chatml, scenario, engines=2)


def test_a_stop_string_over_the_seam_is_still_found(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        for engine in built.engines:
            engine.options.script = built.says("one two three four five six seven eight nine ten eleven")
        whole = await built.events(messages=USER, max_tokens=60, stop=["nine ten"])
        interrupted = asyncio.create_task(built.events(messages=USER, max_tokens=60, stop=["nine ten"]))
        await kill(built, 8)
        assert texts(await interrupted) == texts(whole)

    run(chatml, scenario, engines=2, step_s=0.02)


@pytest.mark.parametrize("choices", [1, 2])
def test_an_engine_that_says_itself_that_it_lost_its_worker_is_followed_by_another(chatml: Path, choices: int) -> None:
    async def scenario(built: Rig) -> None:
        asked: dict[str, Any] = {"messages": USER, "max_tokens": 60, "seed": 11, "n": choices}
        whole = await built.events(**asked)
        interrupted = asyncio.create_task(built.events(**asked))
        victim = await far_enough(built, 8)
        victim.lose_worker()
        assert texts(await interrupted) == texts(whole)

    run(chatml, scenario, engines=2)


def test_a_lost_worker_without_another_engine_is_a_loss(chatml: Path) -> None:
    """The engine refuses what comes back to it until it has ended: that refusal is not what the client is to hear."""

    async def scenario(built: Rig) -> None:
        running = asyncio.create_task(built.events(messages=USER, max_tokens=200))
        (await far_enough(built, 3)).lose_worker()
        assert (await asyncio.wait_for(running, 5))[-1]["error"]["code"] == "engine_lost"

    run(chatml, scenario)


def test_a_request_that_kills_its_engines_is_given_up(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        running = asyncio.create_task(built.events(messages=USER, max_tokens=200))
        for tokens in (3, 6, 9):
            await kill(built, tokens)
        events = await asyncio.wait_for(running, 5)
        assert events[-1]["error"]["code"] == "engine_lost"
        assert built.gateway.fleet.healthy == 1

    run(chatml, scenario, engines=4)


def test_without_another_engine_the_error_is_the_loss(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        async def collect() -> list[Any]:
            sampling = pb.SamplingOptions(max_tokens=200)
            call = built.stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="hello"), sampling=sampling))
            return [event async for event in call]

        running = asyncio.create_task(collect())
        await kill(built, 3)
        with pytest.raises(Exception, match="lost") as caught:
            await asyncio.wait_for(running, 5)
        assert isinstance(from_rpc_error(caught.value), EngineLostError)  # type: ignore[arg-type]

    run(chatml, scenario)
