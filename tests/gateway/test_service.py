"""InferenceService over gRPC: the same answers as over HTTP, and errors with their details."""

from __future__ import annotations

import asyncio
import time
from array import array
from pathlib import Path
from typing import Any

import grpc
import pytest
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid_gateway.requests import Caller, GenerationRequest, SamplingOptions, TextPrompt
from katydid_runtime.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    KatydidError,
    PromptTooLongError,
    UnauthenticatedError,
    UnknownModelError,
)
from katydid_runtime.rpc_errors import from_rpc_error

from tests.gateway.rig import Rig, rig, until

USER = [pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hello there")]


def run(folder: Path, scenario: Any, **options: Any) -> None:
    async def body() -> None:
        async with rig(folder, **options) as built:
            await scenario(built)

    asyncio.run(body())


async def collect(call: Any) -> list[Any]:
    return [event async for event in call]


async def failure(call: Any) -> KatydidError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (collect(call) if hasattr(call, "__aiter__") else call)
    return from_rpc_error(caught.value)


def test_generate_streams_text_ids_and_an_account(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.script = built.says("hi, Köln 🦗")
        sampling = pb.SamplingOptions(max_tokens=40, logprobs=1, seed=5)
        events = await collect(
            built.stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="hello"), sampling=sampling))
        )
        assert "".join(event.text for event in events) == "hi, Köln 🦗"
        ids = array("I", b"".join(event.token_ids for event in events))
        assert built.tokenizer.decode(list(ids)) == "hi, Köln 🦗"
        assert b"".join(entry.bytes for event in events for entry in event.logprobs).decode() == "hi, Köln 🦗"
        last = events[-1]
        assert last.usage.completion_tokens == len(ids)
        assert last.timing.engine == "engine-0"
        assert {"tokenise", "route", "queue", "prefill", "transport", "rest"} <= set(last.timing.phases)
        assert [event.finish_reason for event in events if event.finish_reason] == [pb.FINISH_REASON_STOP]
        assert {event.request_id for event in events} == {built.engines[0].submitted[0].request_id}
        by_ids = pb.GenerateRequest(prompt=pb.Prompt(token_ids=ids.tobytes()), sampling=sampling)
        assert (await collect(built.stub.Generate(by_ids)))[-1].usage.prompt_tokens == len(ids)

    run(chatml, scenario)


def test_chat_with_tools_and_reasoning(hy3: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.script = built.says(
            "hm</think>ok<tool_calls><tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        )
        events = await collect(
            built.stub.Chat(
                pb.ChatRequest(
                    messages=USER,
                    tools=[pb.Tool(name="f", parameters='{"properties": {"a": {"type": "string"}}}')],
                    reasoning_effort="high",
                    sampling=pb.SamplingOptions(max_tokens=300),
                )
            )
        )
        assert "".join(event.reasoning_content for event in events) == "hm"
        assert "".join(event.content for event in events) == "ok"
        calls = [call for event in events for call in event.tool_calls]
        assert calls[0].name == "f"
        assert "".join(call.arguments for call in calls) == '{"a": "1"}'
        assert events[-2].finish_reason == pb.FINISH_REASON_TOOL_CALLS
        assert events[-1].usage.reasoning_tokens > 0

    run(hy3, scenario)


def test_tokenize_and_back(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        text = "Grüße 🦗"
        tokens = await built.stub.Tokenize(pb.TokenizeRequest(text=text))
        assert tokens.tokens == len(tokens.token_ids) // 4
        assert list(array("I", tokens.token_ids)) == built.tokenizer.encode(text).ids
        back = await built.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids[4:]))
        assert back.text == text
        chat = await built.stub.Tokenize(pb.TokenizeRequest(messages=USER))
        assert chat.prompt == "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
        assert (await built.stub.Detokenize(pb.DetokenizeRequest())).text == ""

    run(chatml, scenario)


def test_models(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        models = (await built.stub.ListModels(pb.ListModelsRequest())).models
        assert [(model.id, model.max_model_tokens, model.engines) for model in models] == [("mock", 8192, 2)]

    run(chatml, scenario, engines=2)


def test_a_route_is_explained_without_being_taken(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        prompt = pb.Prompt(text="the quick brown fox jumps over the lazy dog " * 30)
        explain = pb.ExplainRouteRequest(prompt=prompt)
        cold = await built.stub.ExplainRoute(explain)
        assert cold.blocks == cold.prompt_tokens // 64
        assert [candidate.home for candidate in cold.candidates].count(True) == 1
        for candidate in cold.candidates:
            terms = (
                candidate.queue.ToNanoseconds()
                + candidate.fetch.ToNanoseconds()
                + candidate.prefill.ToNanoseconds()
                + candidate.pressure.ToNanoseconds()
            )
            assert candidate.predicted_ttft.ToNanoseconds() == pytest.approx(terms, abs=3)
        await collect(built.stub.Generate(pb.GenerateRequest(prompt=prompt, sampling=pb.SamplingOptions(max_tokens=1))))
        warm = await built.stub.ExplainRoute(explain)
        assert warm.candidates[0].engine == cold.candidates[0].engine
        assert warm.candidates[0].device_blocks == warm.blocks
        assert "blocks of the prompt" in warm.reason
        explain.without_engine = warm.candidates[0].engine
        without = await built.stub.ExplainRoute(explain)
        assert without.candidates[0].engine != warm.candidates[0].engine
        assert without.candidates[-1].excluded == "left out"
        explain.with_another = True
        more = await built.stub.ExplainRoute(explain)
        assert [candidate.device_blocks for candidate in more.candidates if candidate.engine == "one more"] == [0]
        assert "one more" not in built.gateway.fleet.connections
        explain.without_engine = "nobody"
        assert (await failure(built.stub.ExplainRoute(explain))).field == "without_engine"
        assert sum(len(engine.submitted) for engine in built.engines) == 1

    run(chatml, scenario, engines=3)


def test_errors_carry_field_value_and_range(chatml: Path) -> None:
    def generate(**sampling: Any) -> pb.GenerateRequest:
        return pb.GenerateRequest(prompt=pb.Prompt(text="x"), sampling=pb.SamplingOptions(**sampling))

    async def scenario(built: Rig) -> None:
        stub = built.stub
        hot = await failure(stub.Generate(generate(temperature=3)))
        assert isinstance(hot, InvalidRequestError)
        assert (hot.field, hot.value, hot.allowed) == ("temperature", "3.0", "a number in [0.0, 2.0]")
        assert isinstance(await failure(stub.Generate(pb.GenerateRequest(model="x"))), InvalidRequestError)
        unknown = pb.GenerateRequest(model="x", prompt=pb.Prompt(text="x"))
        assert isinstance(await failure(stub.Generate(unknown)), UnknownModelError)
        long = pb.GenerateRequest(prompt=pb.Prompt(text="word " * 9000))
        assert isinstance(await failure(stub.Generate(long)), PromptTooLongError)
        for request, field in (
            (pb.ChatRequest(), "messages"),
            (pb.ChatRequest(messages=[pb.ChatMessage(content="x")]), "messages[0].role"),
            (pb.ChatRequest(messages=USER, tools=[pb.Tool(name="f", parameters="{")]), "tools[0].parameters"),
            (pb.ChatRequest(messages=USER, tools=[pb.Tool(name="f", parameters="[]")]), "tools[0].parameters"),
            (pb.ChatRequest(messages=USER, options=pb.RequestOptions(priority=9999)), "priority"),
            (
                pb.ChatRequest(
                    messages=USER,
                    sampling=pb.SamplingOptions(response_format=pb.ResponseFormat(regex="a")),
                ),
                "response_format",
            ),
        ):
            error = await failure(stub.Chat(request))
            assert isinstance(error, InvalidRequestError)
            assert error.field == field
        assert (await failure(stub.Tokenize(pb.TokenizeRequest()))).field == "prompt"
        assert (await failure(stub.Detokenize(pb.DetokenizeRequest(token_ids=b"123")))).field == "prompt"
        assert built.engines[0].submitted == []

    run(chatml, scenario)


def test_a_callers_deadline_ends_the_engines_work(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.prefill_s = 30
        request = pb.GenerateRequest(prompt=pb.Prompt(text="x"))
        assert isinstance(await failure(built.stub.Generate(request, timeout=1.0)), DeadlineExceededError)
        assert 0 < built.engines[0].submitted[0].timeout.ToNanoseconds() <= 1.1e9  # gRPC rounds it up
        await until(lambda: built.engines[0].in_flight == 0)

    run(chatml, scenario)


def test_a_deadline_that_has_passed_is_not_taken_for_none(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        asked = GenerationRequest(TextPrompt("x"), "", SamplingOptions(max_tokens=2))
        built.engines[0].options.prefill_s = 30

        async def answered() -> None:
            async with built.gateway.generator.answer(asked, Caller(time.time_ns(), timeout_s=0.0), "generate") as it:
                await collect(it.batches())

        with pytest.raises(DeadlineExceededError):
            await asyncio.wait_for(answered(), 5)

    run(chatml, scenario)


def test_keys_and_request_ids_come_in_metadata(chatml: Path, tmp_path: Path) -> None:
    from hashlib import sha256

    keys = tmp_path / "keys"
    keys.write_text(f"team {sha256(b'k').hexdigest()}")

    async def scenario(built: Rig) -> None:
        assert isinstance(await failure(built.stub.ListModels(pb.ListModelsRequest())), UnauthenticatedError)
        metadata = (("authorization", "Bearer k"), ("x-request-id", "turn-9"))
        request = pb.GenerateRequest(prompt=pb.Prompt(text="x"), sampling=pb.SamplingOptions(max_tokens=2))
        events = await collect(built.stub.Generate(request, metadata=metadata))
        assert events[0].request_id == "turn-9"

    run(chatml, scenario, api_keys_file=str(keys))
