"""OpenAI's Responses API as OpenAI's own client speaks it, against a gateway with a mock engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway.rig import Rig, rig

CALL = "<tool_calls><tool_call>add<tool_sep><arg_key>a</arg_key><arg_value>2</arg_value></tool_call></tool_calls>"
TOOLS: Any = [
    {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
]


def run(folder: Path, scenario: Callable[[Rig, openai.AsyncOpenAI], Any], **options: Any) -> None:
    async def body() -> None:
        async with (
            rig(folder, **options) as built,
            openai.AsyncOpenAI(base_url=f"{built.url}/v1", api_key="key", max_retries=0) as client,
        ):
            await scenario(built, client)

    asyncio.run(body())


def test_text_whole_and_streamed(chatml: Path) -> None:
    async def scenario(built: Rig, client: openai.AsyncOpenAI) -> None:
        built.engines[0].options.script = built.says("hi, Köln 🦗")
        whole = await client.responses.create(model="mock", input="hello there", instructions="Be kind.")
        assert (whole.output_text, whole.status) == ("hi, Köln 🦗", "completed")
        assert whole.usage is not None
        assert whole.usage.input_tokens == len(built.engines[0].submitted[0].prompt_ids) // 4
        body = {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "hello there"},
            ]
        }
        await built.http.post("/v1/chat/completions", json=body)
        assert built.engines[0].submitted[0].prompt_ids == built.engines[0].submitted[1].prompt_ids
        async with client.responses.stream(model="mock", input="hello there", instructions="Be kind.") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        numbers = [event.sequence_number for event in events]
        assert numbers == sorted(numbers)
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "hi, Köln 🦗"
        assert final.output_text == whole.output_text
        assert [item.type for item in final.output] == ["message"]

    run(chatml, scenario)


def test_a_turn_with_thoughts_calls_and_results(hy3: Path) -> None:
    async def scenario(built: Rig, client: openai.AsyncOpenAI) -> None:
        built.engines[0].options.script = built.says(f"hm</think>I add.{CALL}")
        question: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hello there"}]}]
        asked: Any = {"model": "mock", "tools": TOOLS, "reasoning": {"effort": "medium"}}
        first = await client.responses.create(input=question, **asked)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        call: Any = first.output[2]
        assert (call.name, call.arguments) == ("add", '{"a": 2}')
        async with client.responses.stream(input=question, **asked) as stream:
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        built.engines[0].options.script = built.says("4</think>It is 4.")
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
        told = [item.model_dump(exclude_none=True) for item in first.output]
        second = await client.responses.create(input=[*question, *told, result], **asked)
        assert second.output_text == "It is 4."
        function = {"name": "add", "arguments": call.arguments}
        said = {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        }
        messages = [
            {"role": "user", "content": "hello there"},
            said,
            {"role": "tool", "tool_call_id": call.call_id, "content": "4"},
        ]
        tools = [{"type": "function", "function": {"name": "add", "parameters": TOOLS[0]["parameters"]}}]
        body = {"messages": messages, "tools": tools, "reasoning_effort": "high"}
        assert (await built.http.post("/v1/chat/completions", json=body)).status_code == 200
        assert built.engines[0].submitted[-1].prompt_ids == built.engines[0].submitted[-2].prompt_ids

    run(hy3, scenario)


def test_what_is_cut_is_incomplete(chatml: Path) -> None:
    async def scenario(_built: Rig, client: openai.AsyncOpenAI) -> None:
        cut = await client.responses.create(model="mock", input="hello there", max_output_tokens=2)
        assert cut.status == "incomplete"
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"

    run(chatml, scenario)


def test_a_call_that_is_cut_off_is_not_to_be_made(hy3: Path) -> None:
    async def scenario(built: Rig, client: openai.AsyncOpenAI) -> None:
        said = built.says(CALL, eos=False)
        whole = len(said(None, None, 0))
        built.engines[0].options.script = said
        for limit, status in ((whole - 4, "incomplete"), (whole, "completed")):
            asked: Any = {"model": "mock", "input": "add", "tools": TOOLS, "max_output_tokens": limit}
            ended = [
                event.item
                async for event in await client.responses.create(stream=True, **asked)
                if event.type == "response.output_item.done"
            ]
            assert [getattr(item, "status", None) for item in ended] == [status]
            assert [getattr(item, "status", None) for item in (await client.responses.create(**asked)).output] == [
                status
            ]

    run(hy3, scenario)


def test_errors(chatml: Path) -> None:
    async def scenario(built: Rig, client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="previous_response_id") as caught:
            await client.responses.create(model="mock", input="hi", previous_response_id="resp_1")
        assert caught.value.param == "previous_response_id"
        for more in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
            with pytest.raises(openai.BadRequestError, match="chat completions") as caught:
                await client.responses.create(model="mock", input="hi", **more)
            assert caught.value.param in more
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="other", input="hi")
        part: Any = {"type": "input_image", "image_url": "http://x/y.png", "detail": "auto"}
        with pytest.raises(openai.BadRequestError, match="input_image"):
            await client.responses.create(model="mock", input=[{"role": "user", "content": [part]}])
        built.engines[0].options.step_s = 0.02

        async def lose() -> None:
            async for _ in await client.responses.create(model="mock", input="hi", stream=True, max_output_tokens=500):
                if built.engines[0].in_flight:
                    await built.engines[0].stop()

        with pytest.raises(openai.APIError, match="lost"):
            await lose()

    run(chatml, scenario)


def test_tokenize_and_back(chatml: Path) -> None:
    async def scenario(built: Rig, _client: openai.AsyncOpenAI) -> None:
        asked = {"prompt": "hello Köln", "return_token_strs": True, "add_special_tokens": False}
        there = (await built.http.post("/tokenize", json=asked)).json()
        assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
        back = await built.http.post("/detokenize", json={"tokens": there["tokens"]})
        assert back.json() == {"prompt": "hello Köln"}
        await built.chat()
        messages = [{"role": "user", "content": "hello there"}]
        rendered = (await built.http.post("/tokenize", json={"messages": messages})).json()
        assert rendered["count"] == len(built.engines[0].submitted[0].prompt_ids) // 4
        for body in ({}, {"prompt": "a", "messages": messages}):
            assert (await built.http.post("/tokenize", json=body)).status_code == 400
        assert (await built.http.post("/detokenize", json={"tokens": ["x"]})).json()["error"]["param"] == "tokens"

    run(chatml, scenario)
