"""Whatever HTTP can ask for, gRPC and the SDK can: the engine gets the same request, the caller the same answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from katydid.engine.v1 import engine_pb2 as pb
from katydid_client import AsyncKatydid, Completion
from katydid_runtime.errors import InvalidRequestError

from tests.gateway.mock_engine import MockOptions
from tests.gateway.rig import Rig, rig

KINDS = ("json_schema", "regex", "ebnf", "choice", "structural_tag")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello"},
    {
        "role": "assistant",
        "content": "well",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "user", "content": "and now?"},
]
CALL = (
    "<think>let me see</think>It is:<tool_calls><tool_call>weather<tool_sep>"
    "<arg_key>a</arg_key><arg_value>7</arg_value></tool_call></tool_calls>"
)

# What HTTP calls it, and what the SDK does.
CHATS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (
        {
            "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 5,
            "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": 1.5}, "min_tokens": 2, "n": 2,
            "stop": ["zzz"], "stop_token_ids": [9], "include_stop_str_in_output": True, "ignore_eos": True,
            "priority": 3, "prompt_cache_key": "k", "bypass_cache": True, "allow_sparse_prefill": True,
        },
        {
            "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 5,
            "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {5: 1.5}, "min_tokens": 2, "n": 2,
            "stop": ["zzz"], "stop_token_ids": [9], "include_stop": True, "ignore_eos": True,
            "priority": 3, "prompt_cache_key": "k", "bypass_cache": True, "allow_sparse_prefill": True,
        },
    ),
    ({"logprobs": True, "top_logprobs": 2, "seed": 1}, {"logprobs": 2, "seed": 1}),
    ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
    ({"chat_template_kwargs": {"reasoning_effort": "low"}}, {"template_options": {"reasoning_effort": "low"}}),
    ({"tools": TOOLS}, {"tools": TOOLS}),
    ({"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "none"}),
    ({"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS, "tool_choice": "required"}),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}},
        {"tools": TOOLS, "tool_choice": "now"},
    ),
    (
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "low"},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "low"},
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"json_schema": SCHEMA}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_object"}, "tools": TOOLS}, {"json_object": True, "tools": TOOLS}),
    ({"response_format": {"type": "regex", "pattern": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    (
        {"guided_grammar": 'root ::= "x"', "reasoning_effort": "high"},
        {"grammar": 'root ::= "x"', "reasoning_effort": "high"},
    ),
    ({"response_format": {"type": "structural_tag", "format": TAG["format"]}}, {"structural_tag": TAG}),
]  # fmt: skip


def last(built: Rig) -> pb.SubmitRequest:
    """What the engine got last, without what differs from call to call."""
    message = pb.SubmitRequest()
    message.CopyFrom(built.engines[0].submitted[-1])
    for field in ("request", "request_id", "timeout", "traceparent", "tracestate"):
        message.ClearField(field)
    if message.sampling.seed > 2**32:
        message.sampling.seed = 0
    return message


def http_answer(body: Any) -> list[tuple[Any, ...]]:
    return [
        (
            choice["message"]["content"] or "",
            choice["message"].get("reasoning_content", ""),
            [
                (call["function"]["name"], call["function"]["arguments"])
                for call in choice["message"].get("tool_calls", [])
            ],
            choice["finish_reason"],
            [(entry["token"], len(entry["top_logprobs"])) for entry in (choice["logprobs"] or {}).get("content", [])],
        )
        for choice in body["choices"]
    ]


def sdk_answer(completion: Completion) -> list[tuple[Any, ...]]:
    return [
        (
            choice.text,
            choice.reasoning,
            [(call.name, call.arguments) for call in choice.tool_calls],
            str(choice.finish_reason),
            [(entry.text, len(entry.top)) for entry in choice.logprobs],
        )
        for choice in completion.choices
    ]


def test_chats(hy3: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.script = built.says(CALL)
        async with AsyncKatydid(built.gateway.grpc_address) as client:
            for fields, arguments in CHATS:
                body = {"messages": TALK, "max_tokens": 90, **fields}
                response = await built.http.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, (fields, response.text)
                over_http = last(built)
                completion = await client.chat(TALK, max_tokens=90, **arguments)
                assert last(built) == over_http, fields
                assert sdk_answer(completion) == http_answer(response.json()), fields
                usage = response.json()["usage"]
                assert completion.usage.prompt_tokens == usage["prompt_tokens"]
                assert completion.usage.reasoning_tokens == usage["completion_tokens_details"]["reasoning_tokens"]
                async with client.chat_stream(TALK, max_tokens=90, **arguments) as stream:
                    assert sdk_answer(await stream.get_final()) == sdk_answer(completion)

    asyncio.run(_run(hy3, scenario))


def test_completions(hy3: Path) -> None:
    async def scenario(built: Rig) -> None:
        ids = built.tokenizer.encode("hello there").ids
        async with AsyncKatydid(built.gateway.grpc_address) as client:
            for prompt in ("hello there", ids):
                body = {"prompt": prompt, "max_tokens": 5, "echo": True, "logprobs": 2, "seed": 3}
                answer = (await built.http.post("/v1/completions", json=body)).json()["choices"][0]
                over_http = last(built)
                given = await client.generate(prompt, max_tokens=5, logprobs=2, prompt_logprobs=True, seed=3)
                assert last(built) == over_http
                assert answer["text"].endswith(given.text)
                shown = [entry.logprob for entry in (*given.prompt_logprobs, *given.choices[0].logprobs)]
                assert shown == pytest.approx(answer["logprobs"]["token_logprobs"][1:])
            body = {"prompt": "x", "max_tokens": 5, "guided_regex": "a+"}
            assert (await built.http.post("/v1/completions", json=body)).status_code == 200
            over_http = last(built)
            await client.generate("x", max_tokens=5, regex="a+")
            assert last(built) == over_http
            tokens = (await built.http.post("/tokenize", json={"messages": TALK})).json()["tokens"]
            assert list((await client.tokenize(messages=TALK)).ids) == tokens
            text = (await built.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
            assert await client.detokenize(tokens) == text

    asyncio.run(_run(hy3, scenario))


def test_the_constraint_begins_behind_reasoning_and_says_what_was_asked(hy3: Path) -> None:
    async def scenario(built: Rig) -> None:
        built.engines[0].options.script = built.says("{}")
        end = built.tokenizer.token_to_id("</think>").to_bytes(4, "little")
        asked = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
        for effort, begin in (("high", end), ("no_think", b"")):
            await built.chat(response_format=asked, reasoning_effort=effort)
            grammar = last(built).sampling.grammar
            assert (json.loads(grammar.json_schema), grammar.begin_after_ids) == (SCHEMA, begin)
        await built.chat(tools=TOOLS, tool_choice="required")
        elements = json.loads(last(built).sampling.grammar.structural_tag)["format"]["elements"]
        assert [tag["begin"] for tag in elements[1]["tags"]] == [
            "<tool_call>weather<tool_sep>\n",
            "<tool_call>now<tool_sep>\n",
        ]

    asyncio.run(_run(hy3, scenario))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "regex"}}, "response_format.pattern"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[1]"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "a" * (256 * 1024 + 1)}, "guided_regex"),
    ({"guided_json": "[" * 65 + "]" * 65}, "guided_json"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"response_format": {"type": "json_object"}, "tools": TOOLS, "tool_choice": "required"}, "response_format"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "none such"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
]


def test_what_cannot_be_asked_names_its_field(hy3: Path) -> None:
    async def scenario(built: Rig) -> None:
        for fields, field in BAD:
            response = await built.chat(**fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, field), (fields, response.text)
        async with AsyncKatydid(built.gateway.grpc_address) as client:
            with pytest.raises(InvalidRequestError, match="exclude each other"):
                await client.chat(TALK, regex="a", grammar="b")
            with pytest.raises(InvalidRequestError) as caught:
                await client.chat(TALK, template_options={"tools": []})
            assert caught.value.field == "template_options.tools"
        built.engines[0].options.grammar_kinds = ()

    asyncio.run(_run(hy3, scenario))


def test_an_engine_without_grammars_is_not_asked(hy3: Path) -> None:
    async def scenario(built: Rig) -> None:
        refused = (
            {"tools": TOOLS, "tool_choice": "required"},
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_object"}, "tools": TOOLS},
        )
        for fields, field in zip(refused, ("tool_choice", "response_format", "response_format"), strict=True):
            response = await built.chat(**fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert not built.engines[0].submitted

    asyncio.run(_run(hy3, scenario, ()))


async def _run(folder: Path, scenario: Any, kinds: tuple[str, ...] = KINDS) -> None:
    async with rig(folder, options=MockOptions(grammar_kinds=kinds, tokens_per_step=3)) as built:
        await scenario(built)
