"""What agents send back of an answer: all that a model may write in one turn is taken in the next, whatever it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.rig import Rig, rig

USER = {"role": "user", "content": "hello"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def run(folder: Path, scenario: Callable[[Rig], Any], **options: Any) -> None:
    async def body() -> None:
        async with rig(folder, **options) as built:
            await scenario(built)

    asyncio.run(body())


async def prompt(built: Rig, path: str, **body: Any) -> str:
    """What the model gets to read of a request."""
    limit = {"max_output_tokens": 2} if path == RESPONSES else {"max_tokens": 2}
    response = await built.http.post(path, json={"model": "mock", **limit, **body})
    assert response.status_code == 200, response.text
    ids = memoryview(built.engines[0].submitted[-1].prompt_ids).cast("I")
    return str(built.tokenizer.decode(list(ids), skip_special_tokens=False))


@pytest.mark.parametrize("written", ['{"a": 1, "b": "cut o', "[1]", "word", '{"half": "\\ud800"}', "[" * 5000])
def test_arguments_that_are_no_json_object_are_shown_as_they_are(hy3: Path, written: str) -> None:
    """Refused, one call that a model wrote wrongly would end its conversation for good."""

    async def scenario(built: Rig) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
        result = {"role": "tool", "tool_call_id": "c", "content": "no JSON"}
        turn = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
        assert f"<arg_key>INVALID_JSON</arg_key><arg_value>{written}</arg_value>" in await prompt(
            built, CHAT, messages=turn
        )
        items = [
            USER,
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": written},
            {"type": "function_call_output", "call_id": "c", "output": "no JSON"},
        ]
        await prompt(built, RESPONSES, input=items)
        block = {"type": "tool_use", "id": "c", "name": "f", "input": {"INVALID_JSON": written}}
        blocks = [{"type": "tool_result", "tool_use_id": "c", "content": "no JSON"}]
        said = [USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": blocks}]
        await prompt(built, MESSAGES, messages=said)
        assert len({message.prompt_ids for message in built.engines[0].submitted}) == 1

    run(hy3, scenario)


def test_a_turn_that_ended_within_its_thoughts(hy3: Path) -> None:
    async def scenario(built: Rig) -> None:
        thought = {"role": "assistant", "content": None, "reasoning_content": "hm"}
        await prompt(built, CHAT, messages=[USER, thought, USER])
        block = {"type": "thinking", "thinking": "hm", "signature": ""}
        await prompt(built, MESSAGES, messages=[USER, {"role": "assistant", "content": [block]}, USER])
        item = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
        await prompt(built, RESPONSES, input=[USER, item, USER])
        await prompt(built, CHAT, messages=[USER, {"role": "assistant", "content": ""}, USER])
        await prompt(built, MESSAGES, messages=[USER, {"role": "assistant", "content": []}, USER])
        assert len({message.prompt_ids for message in built.engines[0].submitted}) == 1
        # Thoughts that another server alone can read say nothing here.
        sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
        assert await prompt(built, RESPONSES, input=[USER, sealed, USER]) == await prompt(
            built, CHAT, messages=[USER, USER]
        )

    run(hy3, scenario)


def test_marks_of_other_servers_and_frameworks_change_nothing(hy3: Path) -> None:
    async def scenario(built: Rig) -> None:
        plain = await prompt(built, CHAT, messages=[USER, {"role": "assistant", "content": "no"}, USER])
        marks = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
        user = {"role": "user", "content": [{"type": "text", "text": "hello", **marks}], "cache_control": marks}
        tool = {"type": "function", "function": {"name": "f"}}
        assert await prompt(built, CHAT, messages=[USER], tools=[{**tool, "cache_control": marks}]) == await prompt(
            built, CHAT, messages=[USER], tools=[tool]
        )
        for said in (
            {"content": "no", "provider_specific_fields": {"refusal": None}, "function_call": None},
            {"content": [{"type": "refusal", "refusal": "no"}]},
            {"content": None, "refusal": "no"},
        ):
            turn = [user, {"role": "assistant", **said}, USER]
            assert await prompt(built, CHAT, messages=turn, prompt_cache_options={"mode": "explicit"}) == plain
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "caller": {"type": "direct"}}
        result = {"type": "function_call_output", "call_id": "c", "output": "x", "name": "f", "caller": None}
        await prompt(built, RESPONSES, input=[USER, call, result], prompt_cache_options={"mode": "implicit"})

    run(hy3, scenario)


def test_what_claude_code_tells_its_billing_does_not_change_the_prompt(chatml: Path) -> None:
    """It has another hash in every request, at the very beginning: nothing of a prompt would be found in a cache."""
    words = "x-anthropic-billing-header: cc_version=2.1.114.76c; cc_entrypoint=cli; cch={};"

    async def scenario(built: Rig) -> None:
        plain = await prompt(built, MESSAGES, messages=[USER], system="You are an agent.")
        for number in range(2):
            told = words.format(f"ea6a{number}")
            blocks = [{"type": "text", "text": told}, {"type": "text", "text": "You are an agent."}]
            assert await prompt(built, MESSAGES, messages=[USER], system=blocks) == plain
            assert await prompt(built, MESSAGES, messages=[USER], system=f"{told}\nYou are an agent.") == plain
        assert await prompt(built, MESSAGES, messages=[USER], system=words) == await prompt(
            built, MESSAGES, messages=[USER]
        )
        quoted = f"Its first line is {words}"
        assert words in await prompt(built, MESSAGES, messages=[USER], system=quoted)
        body = {"model": "mock", "messages": [USER], "system": [{"type": "text", "text": words}]}
        counted = (await built.http.post("/v1/messages/count_tokens", content=json.dumps(body))).json()
        assert counted["input_tokens"] == len(built.engines[0].submitted[-2].prompt_ids) // 4

    run(chatml, scenario)
