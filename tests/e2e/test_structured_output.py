"""Answers that must look like something, from engines of random weights: as asked for, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from katydid_client import AsyncKatydid, Completion

from tests.e2e.fleet import Fleet

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "rain": {"type": "boolean"}},
    "required": ["unit", "rain"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
USER = [{"role": "user", "content": "How is it?"}]


def asked(fleet: Fleet, **arguments: Any) -> Completion:
    """Over gRPC, by the same seed the same as over HTTP."""

    async def ask() -> Completion:
        async with AsyncKatydid(fleet.gateway.address) as client:
            return await client.chat(USER, max_tokens=200, seed=7, **arguments)

    return asyncio.run(ask())


def over_http(fleet: Fleet, **fields: Any) -> dict[str, Any]:
    import httpx

    body = {"messages": USER, "max_tokens": 200, "seed": 7, **fields}
    answer = httpx.post(f"http://{fleet.gateway.http}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_a_schema_a_pattern_a_choice(fleet: Fleet) -> None:
    said = over_http(fleet, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    value = json.loads(said["message"]["content"])
    assert value.keys() == {"unit", "rain"}
    assert (value["unit"] in ("C", "F"), isinstance(value["rain"], bool)) == (True, True)
    assert said["finish_reason"] == "stop"
    assert asked(fleet, json_schema=SCHEMA).text == said["message"]["content"]
    assert re.fullmatch(
        r"[0-9]{3}-[a-c]+x", over_http(fleet, guided_regex=r"[0-9]{3}-[a-c]{1,9}x")["message"]["content"]
    )
    assert over_http(fleet, structured_outputs={"choice": ["yes", "no"]})["message"]["content"] in ("yes", "no")
    assert asked(fleet, grammar='root ::= "a" "b"*  "c"', stop=None).text.startswith("a")


def test_calls_that_are_forced(fleet: Fleet) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    said = over_http(fleet, tools=TOOLS, tool_choice=named)
    (call,) = said["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]).keys() == {"unit", "rain"}
    assert (said["message"]["content"], said["finish_reason"]) == (None, "tool_calls")
    (same,) = asked(fleet, tools=TOOLS, tool_choice="weather").choices[0].tool_calls
    assert (same.name, same.arguments) == ("weather", call["function"]["arguments"])
    once = over_http(fleet, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert [call["function"]["name"] in ("weather", "stop") for call in once["message"]["tool_calls"]] == [True]


def test_what_cannot_be_enforced_is_refused_with_its_field(fleet: Fleet) -> None:
    import httpx

    for fields in ({"guided_regex": "(["}, {"guided_grammar": "nonsense"}, {"guided_json": {"type": "none such"}}):
        body = {"messages": USER, "max_tokens": 5, **fields}
        answer = httpx.post(f"http://{fleet.gateway.http}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"], answer.text
