"""Anthropic's Messages API as Anthropic's own client speaks it, against a gateway with a mock engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.gateway.rig import Rig, rig

THOUGHT = "two and two, hm"
CALL = "<tool_calls><tool_call>add<tool_sep><arg_key>a</arg_key><arg_value>2</arg_value></tool_call></tool_calls>"
TOOLS: Any = [
    {
        "name": "add",
        "description": "adds",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "cache_control": {"type": "ephemeral"},
    }
]
USER: Any = [{"role": "user", "content": "hello there"}]


def run(folder: Path, scenario: Callable[[Rig, anthropic.AsyncAnthropic], Any], **options: Any) -> None:
    async def body() -> None:
        async with (
            rig(folder, **options) as built,
            anthropic.AsyncAnthropic(base_url=built.url, api_key="key", max_retries=0) as client,
        ):
            await scenario(built, client)

    asyncio.run(body())


def test_text_whole_and_streamed(chatml: Path) -> None:
    async def scenario(built: Rig, client: anthropic.AsyncAnthropic) -> None:
        built.engines[0].options.script = built.says("hi, Köln 🦗")
        whole = await client.messages.create(model="mock", max_tokens=64, messages=USER, system="Be kind.")
        assert [block.model_dump(exclude_none=True) for block in whole.content] == [
            {"type": "text", "text": "hi, Köln 🦗"}
        ]
        assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("end_turn", None, "assistant")
        prompt = built.tokenizer.decode(list(memoryview(built.engines[0].submitted[0].prompt_ids).cast("I")))
        assert "Be kind." in prompt
        assert "hello there" in prompt
        async with client.messages.stream(
            model="mock", max_tokens=64, messages=USER, system=[{"type": "text", "text": "Be kind."}]
        ) as stream:
            pieces = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(pieces) == "hi, Köln 🦗"
        assert len(pieces) > 1
        assert [block.text for block in final.content if block.type == "text"] == ["hi, Köln 🦗"]
        assert final.usage.output_tokens == whole.usage.output_tokens
        assert built.engines[0].submitted[0].prompt_ids == built.engines[0].submitted[1].prompt_ids

    run(chatml, scenario)


def test_thoughts_and_calls_are_blocks(hy3: Path) -> None:
    async def scenario(built: Rig, client: anthropic.AsyncAnthropic) -> None:
        built.engines[0].options.script = built.says(f"{THOUGHT}</think>I add.{CALL}")
        asked: Any = {
            "model": "mock",
            "max_tokens": 400,
            "messages": USER,
            "tools": TOOLS,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        whole = await client.messages.create(**asked)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        thinking, text, call = whole.content
        assert (thinking.thinking, text.text) == (THOUGHT, "I add.")
        assert (call.name, call.input) == ("add", {"a": 2})
        assert whole.stop_reason == "tool_use"
        async with client.messages.stream(**asked) as stream:
            kinds = [event.type async for event in stream if event.type.startswith("content_block_st")]
            final = await stream.get_final_message()
        assert kinds == ["content_block_start", "content_block_stop"] * 3
        assert [block.model_dump(exclude={"id"}) for block in final.content] == [
            block.model_dump(exclude={"id"}) for block in whole.content
        ]

    run(hy3, scenario)


def test_a_turn_with_results_reaches_the_template_as_openais_would(hy3: Path) -> None:
    async def scenario(built: Rig, client: anthropic.AsyncAnthropic) -> None:
        call = {"type": "tool_use", "id": "call-1", "name": "add", "input": {"a": 2}}
        result = {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "4"}]}
        messages: Any = [
            *USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        ]
        await client.messages.create(model="mock", max_tokens=4, messages=messages, tools=TOOLS)
        function = {"name": "add", "arguments": json.dumps({"a": 2})}
        same = [
            *USER,
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "call-1", "content": "4"},
            {"role": "user", "content": "go on"},
        ]
        tool = {"name": "add", "description": "adds", "parameters": TOOLS[0]["input_schema"]}
        body = {"messages": same, "max_tokens": 4, "tools": [{"type": "function", "function": tool}]}
        assert (await built.http.post("/v1/chat/completions", json=body)).status_code == 200
        first, second = built.engines[0].submitted
        assert first.prompt_ids == second.prompt_ids
        counted = await client.messages.count_tokens(model="mock", messages=messages, tools=TOOLS)
        assert counted.input_tokens == len(first.prompt_ids) // 4

    run(hy3, scenario)


def test_arguments_come_back_as_the_model_wrote_them(hy3: Path) -> None:
    async def scenario(built: Rig, client: anthropic.AsyncAnthropic) -> None:
        tools = [{"name": "add", "input_schema": {"type": "object"}}]
        asked: Any = {"model": "mock", "max_tokens": 400, "messages": USER, "tools": tools}
        for value, name in (
            ('{"long": 123456789012345678901234567890}', "a"),
            # Half a surrogate pair is no text, and what holds it no JSON to many clients.
            ('{"half": "\\ud800"}', "INVALID_JSON"),
        ):
            built.engines[0].options.script = built.says(CALL.replace(">2<", f">{value}<"))
            whole = await client.messages.with_raw_response.create(**asked)
            given = json.loads(await whole.text())["content"][-1]["input"]
            assert given == {name: json.loads(value) if name == "a" else f'{{"a": {value}}}'}

    run(hy3, scenario)


def test_an_answer_that_was_begun_is_continued(hy3: Path) -> None:
    async def scenario(built: Rig, client: anthropic.AsyncAnthropic) -> None:
        begun: Any = [*USER, {"role": "assistant", "content": "hy_Assistant: { \n"}]
        await client.messages.create(model="mock", max_tokens=4, messages=begun)
        submitted = built.engines[0].submitted[0].prompt_ids
        prompt = built.tokenizer.decode(list(memoryview(submitted).cast("I")), skip_special_tokens=False)
        assert prompt.endswith("<｜hy_User｜>hello there<｜hy_Assistant｜>hy_Assistant: {")
        counted = await client.messages.count_tokens(model="mock", messages=begun)
        assert counted.input_tokens == len(submitted) // 4

    run(hy3, scenario)


def test_a_context_that_is_full_is_said_in_words_that_claude_code_reads(chatml: Path) -> None:
    """By them it compacts its conversation, or asks for a shorter answer."""

    async def scenario(built: Rig, client: anthropic.AsyncAnthropic) -> None:
        long: Any = [{"role": "user", "content": "word " * 9000}]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8191 maximum"):
            await client.messages.create(model="mock", max_tokens=8, messages=long)
        limit = r"input length and `max_tokens` exceed context limit: (\d+) \+ 8190 > 8192"
        with pytest.raises(anthropic.BadRequestError, match=limit):
            await client.messages.create(model="mock", max_tokens=8190, messages=USER)
        body = {"model": "mock", "messages": USER, "max_completion_tokens": 8190}
        refused = (await built.http.post("/v1/chat/completions", json=body)).json()["error"]
        assert "input length and `max_completion_tokens` exceed context limit" in refused["message"]
        assert "maximum context length is 8192 tokens" in refused["message"]

    run(chatml, scenario)


def test_why_it_stopped(chatml: Path) -> None:
    async def scenario(built: Rig, client: anthropic.AsyncAnthropic) -> None:
        built.engines[0].options.script = built.says("one two three four")
        stopped = await client.messages.create(
            model="mock", max_tokens=64, messages=USER, stop_sequences=["three", "zzz"]
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "three")
        cut = await client.messages.create(model="mock", max_tokens=2, messages=USER)
        assert cut.stop_reason == "max_tokens"
        async with client.messages.stream(
            model="mock", max_tokens=64, messages=USER, stop_sequences=["three"]
        ) as stream:
            assert (await stream.get_final_message()).stop_sequence == "three"

    run(chatml, scenario)


def test_errors_are_anthropics(chatml: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    poor = f"poor {hashlib.sha256(b'poor').hexdigest()} tokens_per_minute=1"
    keys.write_text(f"team {hashlib.sha256(b'key').hexdigest()}\n{poor}\n")

    async def scenario(built: Rig, client: anthropic.AsyncAnthropic) -> None:
        assert (await client.messages.create(model="mock", max_tokens=2, messages=USER)).role == "assistant"
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(model="mock", max_tokens=2, messages=USER)
        with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
            await client.messages.create(model="mock", max_tokens=2, messages=USER, extra_body={"temperature": 9})
        assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index, call-overload]
        with pytest.raises(anthropic.NotFoundError, match="other"):
            await client.messages.create(model="other", max_tokens=2, messages=USER)
        poor = client.with_options(api_key="poor")
        await poor.messages.create(model="mock", max_tokens=2, messages=USER)
        with pytest.raises(anthropic.RateLimitError) as quota:
            await poor.messages.create(model="mock", max_tokens=2, messages=USER)
        assert quota.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index, call-overload]
        image: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        with pytest.raises(anthropic.BadRequestError, match=r"'image'; allowed: .*text"):
            await client.messages.create(model="mock", max_tokens=2, messages=[{"role": "user", "content": [image]}])
        built.engines[0].options.step_s = 0.02

        async def lose() -> None:
            async with client.messages.stream(model="mock", max_tokens=500, messages=USER) as stream:
                async for _ in stream.text_stream:
                    await built.engines[0].stop()

        with pytest.raises(anthropic.APIStatusError, match="lost"):
            await lose()

    run(chatml, scenario, api_keys_file=str(keys))
