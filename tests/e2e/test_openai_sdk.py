"""OpenAI's Python SDK, unchanged, against three services that serve hy3-tiny: a model that answers and calls tools."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from katydid_cli.fleet.plan import HOST, free_ports
from openai import AsyncOpenAI, OpenAI

from tests.e2e.fleet import Fleet, Process, running_fleet

pytestmark = pytest.mark.e2e

MODEL = Path(__file__).resolve().parents[2] / "models" / "hy3-tiny"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY = [{"role": "user", "content": "Once upon a time"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
GREEDY: dict[str, Any] = {"model": MODEL.name, "temperature": 0, "max_tokens": 60}


@pytest.fixture(scope="module")
def hy3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(MODEL, tmp_path_factory.mktemp("hy3"), engine_options=("--kv-pages", "256")) as fleet:
        yield fleet


@pytest.fixture
def client(hy3: Fleet) -> Iterator[OpenAI]:
    with OpenAI(base_url=hy3.base_url, api_key="none", max_retries=0, timeout=120) as built:
        yield built


@pytest.fixture(scope="module")
def answer(hy3: Fleet) -> str:
    """The model's greedy answer to QUESTION."""
    with OpenAI(base_url=hy3.base_url, api_key="none", max_retries=0, timeout=120) as client:
        text = client.chat.completions.create(**GREEDY, messages=QUESTION).choices[0].message.content
    assert text is not None
    assert "Paris" in text
    return text


def test_whole_and_streamed_answers_agree(client: OpenAI, answer: str) -> None:
    whole = client.chat.completions.create(**GREEDY, messages=QUESTION)
    assert whole.choices[0].message.content == answer
    assert whole.choices[0].finish_reason == "stop"
    with client.chat.completions.create(
        **GREEDY, messages=QUESTION, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == answer
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 3
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole._request_id
    assert whole._request_id in whole.id


def test_usage_counts_what_a_cache_held(client: OpenAI) -> None:
    """A second turn has the first one's blocks in front of it."""
    first = [{"role": "user", "content": "Tell me about the sea. " * 30}]
    answer = client.chat.completions.create(**GREEDY, messages=first)
    again = [*first, {"role": "assistant", "content": answer.choices[0].message.content}, *QUESTION]
    usage = client.chat.completions.create(**GREEDY, messages=again).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert 128 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens % 64 == 0


def test_a_tool_is_called_and_its_result_used(client: OpenAI) -> None:
    asked = client.chat.completions.create(**GREEDY, messages=WEATHER, tools=TOOLS)
    assert asked.choices[0].finish_reason == "tool_calls"
    message = asked.choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    told = [*WEATHER, message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(**GREEDY, messages=told, tools=TOOLS).choices[0]
    assert after.finish_reason == "stop"
    assert after.message.content


def test_a_streamed_tool_call(client: OpenAI) -> None:
    with client.chat.completions.stream(**GREEDY, messages=WEATHER, tools=TOOLS) as stream:
        events = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in events
    assert "tool_calls.function.arguments.done" in events
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert [(call.function.name, json.loads(call.function.arguments)) for call in final.message.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]


def test_tool_choice_none_is_respected(client: OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, messages=WEATHER, tools=TOOLS, tool_choice="none").choices[0]
    assert answer.message.tool_calls is None
    assert answer.message.content


def test_log_probabilities_of_both_apis(client: OpenAI, answer: str) -> None:
    chosen = client.chat.completions.create(**GREEDY, messages=QUESTION, logprobs=True, top_logprobs=3).choices[0]
    assert chosen.logprobs is not None
    assert chosen.logprobs.content is not None
    assert "".join(entry.token for entry in chosen.logprobs.content) == answer
    for entry in chosen.logprobs.content:
        assert entry.bytes == list(entry.token.encode())
        top = [other.logprob for other in entry.top_logprobs]
        assert top == sorted(top, reverse=True)
        assert entry.logprob == top[0] <= 0, "greedy takes the most likely"
    text = client.completions.create(**GREEDY | {"max_tokens": 3}, prompt="The capital of", logprobs=2, echo=True)
    columns = text.choices[0].logprobs
    assert columns is not None
    assert columns.tokens is not None
    assert columns.token_logprobs is not None
    assert "".join(columns.tokens[1:]) == text.choices[0].text, "the first token only begins the text"
    assert columns.token_logprobs[0] is None
    assert all(value <= 0 for value in columns.token_logprobs[1:])
    assert text.choices[0].text.startswith("The capital of")


def test_n_answers_whole_and_streamed(client: OpenAI) -> None:
    sampled = {"model": MODEL.name, "messages": STORY, "temperature": 1.5, "n": 3, "seed": 4, "max_tokens": 12}
    whole = client.chat.completions.create(**sampled)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) > 1, "each choice draws for itself"
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**sampled, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts, "the seed repeats them"


def test_stop_strings_and_length(client: OpenAI, answer: str) -> None:
    # From the middle of a word into the next: no token border helps.
    stop = answer[10:15]
    cut = client.chat.completions.create(**GREEDY, messages=QUESTION, stop=[stop, "never"]).choices[0]
    assert cut.message.content == answer.partition(stop)[0]
    assert cut.finish_reason == "stop"
    chunks = client.chat.completions.create(**GREEDY, messages=QUESTION, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == cut.message.content
    short = client.chat.completions.create(**GREEDY | {"max_tokens": 2}, messages=QUESTION)
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None
    assert short.usage.completion_tokens == 2


def test_completions_of_several_prompts_and_of_ids(client: OpenAI) -> None:
    several = client.completions.create(**GREEDY | {"max_tokens": 4}, prompt=["one", "two"], n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text
    streamed = client.completions.create(**GREEDY | {"max_tokens": 4}, prompt="one", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == several.choices[0].text
    assert client.completions.create(**GREEDY | {"max_tokens": 1}, prompt=[100, 101, 102]).usage.prompt_tokens == 3


BAD: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str, str]] = {
    "unknown model": ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found", "model"),
    "temperature": ({"temperature": 9}, openai.BadRequestError, "invalid_request", "temperature"),
    "n": ({"n": 1000}, openai.BadRequestError, "invalid_request", "n"),
    "role": (
        {"messages": [{"role": "robot", "content": "x"}]},
        openai.BadRequestError,
        "invalid_request",
        "messages[0].role",
    ),
    "context": (
        {"messages": [{"role": "user", "content": "x " * 20_000}]},
        openai.BadRequestError,
        "context_length_exceeded",
        "messages",
    ),
    "unknown field": ({"extra_body": {"temperatur": 1}}, openai.BadRequestError, "invalid_request", "temperatur"),
    "grammar": (
        {"extra_body": {"guided_regex": ""}},
        openai.BadRequestError,
        "invalid_request",
        "guided_regex",
    ),
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", BAD)
def test_errors_are_the_sdks_classes(client: OpenAI, kind: str, streamed: bool) -> None:
    change, expected, code, param = BAD[kind]
    with pytest.raises(expected) as caught:
        client.chat.completions.create(**GREEDY | {"messages": QUESTION} | change, stream=streamed)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.request_id
    assert caught.value.type == "invalid_request_error"


def test_no_key_and_no_engine(hy3: Fleet, tmp_path: Path) -> None:
    """A gateway that asks for keys, in front of an engine that is not there."""
    keys = tmp_path / "keys"
    keys.write_text(f"tester {hashlib.sha256(b'sesame').hexdigest()}\n")
    listen, http, nobody = (f"{HOST}:{port}" for port in free_ports(3))
    options = ("--model", str(MODEL), "--engines", nobody, "--api-keys-file", str(keys))
    gateway = Process("katydid_gateway", tmp_path, "--listen", listen, "--http-listen", http, *options, http=http)
    gateway.start()
    try:
        for key, expected in (("guess", openai.AuthenticationError), ("sesame", openai.InternalServerError)):
            with (
                OpenAI(base_url=f"http://{http}/v1", api_key=key, max_retries=0, timeout=30) as client,
                pytest.raises(expected) as caught,
            ):
                client.chat.completions.create(**GREEDY, messages=QUESTION)
        assert caught.value.status_code == 503
    finally:
        gateway.stop()
    with (
        OpenAI(base_url=f"http://{http}/v1", api_key="sesame", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()


def test_a_timeout_and_a_left_stream_free_the_engine(hy3: Fleet) -> None:
    long = {"model": MODEL.name, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}

    async def body() -> None:
        async with AsyncOpenAI(base_url=hy3.base_url, api_key="none", max_retries=0, timeout=120) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.5).completions.create(**long, prompt="once")
            streams = [await client.completions.create(**long, prompt=f"once {i}", stream=True) for i in range(4)]
            for stream in streams:
                assert (await anext(stream)).choices
                await stream.close()
        await hy3.idle()

    asyncio.run(body())


def test_many_async_streams_at_once(hy3: Fleet, answer: str) -> None:
    async def ask(client: AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(**GREEDY, messages=QUESTION, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def body() -> list[str]:
        async with AsyncOpenAI(base_url=hy3.base_url, api_key="none", max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(ask(client) for _ in range(12)))

    assert asyncio.run(body()) == [answer] * 12
