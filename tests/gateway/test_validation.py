"""Every range of a request: the edge passes, one beyond fails, and the error names field, value and range."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from katydid_gateway.requests import (
    Conversation,
    Message,
    OutputFormat,
    Prompt,
    RequestOptions,
    Role,
    SamplingOptions,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolCall,
)
from katydid_gateway.validation import ModelLimits, check_model, check_options, check_prompt, resolve_sampling
from katydid_runtime.errors import InvalidRequestError, PromptTooLongError, UnknownModelError

LIMITS = ModelLimits("hy3-tiny", 1000, 500, 4, 5, frozenset({"json_schema"}))
NONE = SamplingOptions()


def resolved(options: SamplingOptions, defaults: SamplingOptions = NONE, prompt_tokens: int = 10):
    return resolve_sampling(options, defaults, LIMITS, prompt_tokens)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0.0, 2.0], [-0.01, 2.01, float("nan"), float("inf")]),
        ("top_p", [1.0, 1e-6], [0.0, 1.01, -1.0, float("nan")]),
        ("top_k", [0, -1, 5, 10_000], [-2]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1]),
        ("repetition_penalty", [0.01, 2.0], [0.0, 2.1, -1.0]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1]),
        ("n", [1, 4], [0, 5, -1]),
        ("logprobs", [0, 5], [-1, 6]),
        ("seed", [0, -(2**63), 2**64 - 1], [2**64, -(2**63) - 1]),
        ("max_tokens", [1, 990], [0, -5, 991]),
        ("min_tokens", [0, 990], [-1, 991]),
        ("stop", [("x",) * 16, ("x" * 256,)], [("x",) * 17, ("",), ("x" * 257,)]),
        ("stop_token_ids", [(0, 499)], [(500,), (-1,), (1,) * 65]),
        ("logit_bias", [{0: 100.0, 499: -100.0}], [{500: 1.0}, {-1: 1.0}, {1: 100.1}, {1: float("nan")}]),
    ],
)
def test_ranges(field: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        resolved(replace(NONE, **{field: value}))
    for value in bad:
        with pytest.raises(InvalidRequestError) as caught:
            resolved(replace(NONE, **{field: value}))
        assert caught.value.field is not None
        assert caught.value.field.startswith(field)
        assert caught.value.allowed


def test_defaults_of_the_model_come_before_the_gateways() -> None:
    defaults = SamplingOptions(temperature=0.7, top_k=20, repetition_penalty=1.05)
    sampling = resolved(SamplingOptions(temperature=0.0), defaults)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (0.0, 20, 1.0, 1.05)
    assert sampling.max_tokens == 990
    assert resolved(NONE).seed != resolved(NONE).seed
    assert resolved(replace(NONE, seed=-1)).seed == 2**64 - 1


def test_a_prompt_that_fills_the_context_is_too_long() -> None:
    assert resolved(NONE, prompt_tokens=999).max_tokens == 1
    with pytest.raises(PromptTooLongError) as caught:
        resolved(NONE, prompt_tokens=1000)
    assert "this model's maximum context length is 1000 tokens" in caught.value.message, "litellm looks for these words"
    assert (caught.value.field, caught.value.value, caught.value.allowed) == (
        "prompt",
        "1000 tokens",
        "at most 999 tokens",
    )
    with pytest.raises(InvalidRequestError, match="empty"):
        resolved(NONE, prompt_tokens=0)


def test_max_tokens_that_are_not_given() -> None:
    assert resolved(SamplingOptions()).max_tokens == 990
    assert resolved(SamplingOptions(usual_tokens=16)).max_tokens == 16
    assert resolved(SamplingOptions(usual_tokens=5000)).max_tokens == 990, "as many as there is room for"
    assert resolved(SamplingOptions(usual_tokens=16, max_tokens=20)).max_tokens == 20


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        resolved(SamplingOptions(max_tokens=5, min_tokens=6))


def test_a_format_no_engine_serves_is_refused() -> None:
    assert resolved(replace(NONE, format=OutputFormat("json_schema", "{}"))).format is not None
    with pytest.raises(InvalidRequestError, match="regex"):
        resolved(replace(NONE, format=OutputFormat("regex", "a+")))


def test_models() -> None:
    check_model("", LIMITS)
    check_model("hy3-tiny", LIMITS)
    with pytest.raises(UnknownModelError) as caught:
        check_model("gpt-9", LIMITS)
    assert (caught.value.field, caught.value.value, caught.value.allowed) == ("model", "gpt-9", "hy3-tiny")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (RequestOptions(), None),
        (RequestOptions(priority=-1000, request_id="x" * 128), None),
        (RequestOptions(priority=1001), "priority"),
        (RequestOptions(request_id="x" * 129), "request_id"),
        (RequestOptions(request_id="a\nb"), "request_id"),
        (RequestOptions(request_id="ü"), "request_id"),
    ],
)
def test_options(options: RequestOptions, field: str | None) -> None:
    if field is None:
        check_options(options)
        return
    with pytest.raises(InvalidRequestError) as caught:
        check_options(options)
    assert caught.value.field == field


USER = Message(Role.USER, "hi")
CALL = ToolCall(0, "c1", "f", '{"a": 1}')


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt("hi"),
        TokenPrompt(array("I", [0, 499]).tobytes()),
        Conversation(
            (USER, Message(Role.ASSISTANT, None, tool_calls=(CALL,)), Message(Role.TOOL, "1", tool_call_id="c1"))
        ),
        Conversation((USER,), (Tool("f" * 128), Tool("g.h-i_2")), "none"),
        Conversation((USER, Message(Role.ASSISTANT, None, reasoning="hm"))),
        Conversation((Message(Role.USER, ""),)),
    ],
)
def test_good_prompts(prompt: Prompt) -> None:
    check_prompt(prompt, LIMITS)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TextPrompt(""), "prompt"),
        (TokenPrompt(b""), "prompt"),
        (TokenPrompt(b"123"), "prompt"),
        (TokenPrompt(array("I", [500]).tobytes()), "prompt"),
        (Conversation(()), "messages"),
        (Conversation((USER, Message(Role.USER, None))), "messages[1].content"),
        (Conversation((Message(Role.USER, "x", tool_calls=(CALL,)),)), "messages[0].tool_calls"),
        (Conversation((Message(Role.TOOL, "x"),)), "messages[0].tool_call_id"),
        (Conversation((Message(Role.ASSISTANT, None),)), "messages[0].content"),
        (Conversation((Message(Role.USER, None, reasoning="hm"),)), "messages[0].content"),
        (Conversation((USER,), (Tool("bad name"),)), "tools[0].function.name"),
        (Conversation((USER,), (Tool("f" * 129),)), "tools[0].function.name"),
        (Conversation((USER,), (Tool("f"), Tool("f"))), "tools"),
        (Conversation((USER,), (Tool("f"),), "g"), "tool_choice"),
        (Conversation((USER,), (Tool("f"),), "required"), "tool_choice"),
    ],
)
def test_bad_prompts_name_the_place(prompt: Prompt, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_prompt(prompt, LIMITS)
    assert caught.value.field == field
