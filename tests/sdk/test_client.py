"""The client without sockets: what it sends, what it makes of answers, when it tries again."""

from __future__ import annotations

import asyncio

import katydid_client
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid_client import AsyncKatydid, FinishReason, Message, MockTransport, Tool, ToolCall
from katydid_client.retry import delay_s
from katydid_runtime import errors

HELLO = [{"role": "user", "content": "Hello"}]


def seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(value * 1e9))
    return duration


def last_of_request(response_class=pb.ChatResponse, **fields):
    return response_class(
        request_id="r1",
        finish_reason=pb.FINISH_REASON_STOP,
        usage=pb.Usage(
            prompt_tokens=130,
            completion_tokens=2,
            cached_tokens=128,
            cached_by_tier=pb.CachedTokens(device=64, memory=64),
        ),
        timing=pb.Timing(
            ttft=seconds(0.25), tpot=seconds(0.03), phases={"prefill": seconds(0.2)}, engine="e0", trace_id="ab" * 16
        ),
        **fields,
    )


ANSWER = [
    pb.ChatResponse(content="Hi", token_ids=b"\x05\0\0\0"),
    last_of_request(content=" there", token_ids=b"\x06\0\0\0"),
]


def use(handler, scenario, **options):
    """Run `scenario(client)` against `handler`; returns its result and the transport."""

    async def body():
        transport = MockTransport(handler)
        async with AsyncKatydid(transport=transport, **options) as client:
            return await asyncio.wait_for(scenario(client), 10), transport

    return asyncio.run(body())


def test_chat_gathers_the_whole_answer():
    completion, transport = use(lambda *_: ANSWER, lambda client: client.chat(HELLO, temperature=0.5, stop="END"))
    (choice,) = completion.choices
    assert (completion.text, choice.token_ids, choice.finish_reason) == ("Hi there", (5, 6), FinishReason.STOP)
    assert completion.usage.cached_tokens == 128
    assert (completion.usage.cached_by_tier.device, completion.usage.cached_by_tier.memory) == (64, 64)
    assert (completion.timing.ttft_s, completion.timing.tpot_s) == (0.25, 0.03)
    assert (completion.timing.phases_s, completion.timing.engine) == ({"prefill": 0.2}, "e0")
    assert completion.message() == Message("assistant", "Hi there")
    assert transport.closed
    method, request, metadata = transport.calls[0]
    assert (method, request.messages[0].role, request.sampling.stop) == ("Chat", pb.CHAT_ROLE_USER, ["END"])
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert dict(metadata) == {"x-request-id": request.options.request_id}


def test_every_argument_reaches_its_field():
    arguments = {
        "model": "m",
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.0,
        "logit_bias": {7: -2.0},
        "seed": 2**63,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "min_tokens": 1,
        "max_tokens": 9,
        "n": 2,
        "logprobs": 0,
        "ignore_eos": True,
        "include_stop": True,
        "json_schema": {"type": "object"},
        "priority": -3,
        "prompt_cache_key": "k",
        "bypass_cache": True,
        "allow_sparse_prefill": True,
        "request_id": "mine",
        "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
        "tools": [Tool("f", "does f", {"type": "object"}), {"type": "function", "function": {"name": "g"}}],
        "tool_choice": "auto",
        "reasoning_effort": "low",
        "parallel_tool_calls": False,
        "template_options": {"style": "terse"},
        "prompt_logprobs": True,
    }
    given = set(arguments) | {"json_object", "regex", "grammar", "choice", "structural_tag"}
    assert given == set(katydid_client.ChatArguments.__annotations__)
    _, transport = use(lambda *_: ANSWER, lambda client: client.chat(HELLO, **arguments), api_key="sk-1")
    _, request, metadata = transport.calls[0]
    sampling = request.sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed", "n"):
        assert sampling.HasField(name)
        assert getattr(sampling, name) == arguments[name]
    assert sampling.HasField("logprobs")
    assert dict(sampling.logit_bias) == {7: -2.0}
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["a", "b"], [1, 2])
    assert sampling.response_format.json_schema == '{"type": "object"}'
    assert (request.options.priority, request.options.prompt_cache_key, request.options.bypass_cache) == (-3, "k", True)
    assert [(tool.name, tool.parameters) for tool in request.tools] == [("f", '{"type": "object"}'), ("g", "")]
    assert (request.HasField("parallel_tool_calls"), request.parallel_tool_calls) == (True, False)
    assert (request.template_options, sampling.prompt_logprobs) == ('{"style": "terse"}', True)
    assert (request.model, request.tool_choice, request.reasoning_effort) == ("m", "auto", "low")
    assert dict(metadata) == {
        "authorization": "Bearer sk-1",
        "x-request-id": "mine",
        "traceparent": arguments["traceparent"],
    }


@pytest.mark.parametrize("prompt", ["text", [1, 2, 4294967295]])
def test_generate_takes_text_or_ids(prompt):
    answer = [last_of_request(pb.GenerateResponse, text="done")]
    completion, transport = use(lambda *_: answer, lambda client: client.generate(prompt))
    assert completion.text == "done"
    sent = transport.calls[0][1].prompt
    assert sent.text == prompt if isinstance(prompt, str) else len(sent.token_ids) == 12


def test_parallel_answers_and_tool_calls_are_put_together():
    answer = [
        pb.ChatResponse(index=1, tool_calls=[pb.ToolCall(index=0, id="c1", name="look")]),
        pb.ChatResponse(index=0, content="A", reasoning_content="hm"),
        pb.ChatResponse(index=1, tool_calls=[pb.ToolCall(index=0, arguments='{"q"')]),
        pb.ChatResponse(index=0, finish_reason=pb.FINISH_REASON_LENGTH),
        pb.ChatResponse(index=1, tool_calls=[pb.ToolCall(index=0, arguments=":1}"), pb.ToolCall(index=1, name="b")]),
        last_of_request(index=1),
    ]
    answer[-1].finish_reason = pb.FINISH_REASON_TOOL_CALLS
    completion, _ = use(lambda *_: answer, lambda client: client.chat(HELLO, n=2))
    first, second = completion.choices
    assert (first.text, first.reasoning, first.finish_reason) == ("A", "hm", "length")
    assert second.tool_calls == (ToolCall("look", '{"q":1}', "c1", 0), ToolCall("b", "", "", 1))
    assert second.finish_reason is FinishReason.TOOL_CALLS


def test_a_conversation_survives_the_round_trip():
    messages = [
        Message("system", "Be brief."),
        Message("assistant", tool_calls=(ToolCall("f", "{}", "c1"),), reasoning="think"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c2", "function": {"name": "g", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c2"},
    ]
    _, transport = use(lambda *_: ANSWER, lambda client: client.chat(messages))
    sent = transport.calls[0][1].messages
    assert [message.role for message in sent] == [1, 3, 3, 4]
    assert (sent[1].tool_calls[0].id, sent[1].reasoning_content) == ("c1", "think")
    assert (sent[2].tool_calls[0].name, sent[3].tool_call_id) == ("g", "c2")


def test_a_stream_shows_events_and_the_whole():
    async def scenario(client):
        async with client.chat_stream(HELLO) as stream:
            first = await anext(stream)
            assert (first.text, stream.text_so_far) == ("Hi", "Hi")
            return await stream.get_final()

    completion, _ = use(lambda *_: ANSWER, scenario)
    assert completion.text == "Hi there"


def test_leaving_a_stream_early_closes_the_call():
    closed = []

    async def endless():
        try:
            while True:
                yield pb.ChatResponse(content="x")
        finally:
            closed.append(True)

    async def scenario(client):
        async with client.chat_stream(HELLO) as stream:
            async for _ in stream:
                break
        assert closed == [True]

    use(lambda *_: endless(), scenario)


def test_a_stream_outside_its_block_is_refused():
    async def scenario(client):
        with pytest.raises(RuntimeError, match="async with"):
            await anext(client.chat_stream(HELLO))

    use(lambda *_: ANSWER, scenario)


@pytest.mark.parametrize("answer", [[], ANSWER[:1], [pb.ChatResponse(usage=pb.Usage(), timing=pb.Timing())]])
def test_a_truncated_answer_is_an_error(answer):
    with pytest.raises(errors.InternalError, match="ended without"):
        use(lambda *_: answer, lambda client: client.chat(HELLO))


class Flaky:
    """Fails with the given errors in turn, then answers."""

    def __init__(self, *failures: errors.KatydidError) -> None:
        self.failures = list(failures)

    def __call__(self, method, request):
        if self.failures:
            raise self.failures.pop(0)
        return ANSWER if method == "Chat" else pb.ListModelsResponse(models=[pb.Model(id="m", engines=2)])


@pytest.fixture
def sleeps(monkeypatch):
    waited = []

    async def sleep(delay: float) -> None:
        waited.append(delay)

    monkeypatch.setattr("katydid_client.client.asyncio.sleep", sleep)
    return waited


def test_retries_before_the_first_byte_under_one_request_id(sleeps):
    handler = Flaky(errors.UnavailableError("a"), errors.OverloadedError("b", retry_after_s=3))
    completion, transport = use(handler, lambda client: client.chat(HELLO))
    assert completion.text == "Hi there"
    assert len({dict(metadata)["x-request-id"] for _, _, metadata in transport.calls}) == 1
    assert sleeps[1] == 3
    assert 0.25 <= sleeps[0] <= 0.5


def test_unary_calls_retry_too(sleeps):
    models, _ = use(Flaky(errors.UnavailableError("a")), lambda client: client.models())
    assert (models[0].id, models[0].engines, len(sleeps)) == ("m", 2, 1)


def test_the_last_error_surfaces_when_retries_are_used_up(sleeps):
    handler = Flaky(*(errors.UnavailableError(str(i)) for i in range(5)))
    with pytest.raises(errors.UnavailableError, match="1"):
        use(handler, lambda client: client.with_options(max_retries=1).chat(HELLO))
    assert len(sleeps) == 1


def test_no_retry_after_the_first_byte(sleeps):
    def handler(method, request):
        async def broken():
            yield ANSWER[0]
            raise errors.UnavailableError("lost")

        return broken()

    with pytest.raises(errors.UnavailableError):
        use(handler, lambda client: client.chat(HELLO))
    assert sleeps == []


def test_no_retry_of_what_is_wrong(sleeps):
    with pytest.raises(errors.PromptTooLongError):
        use(Flaky(errors.PromptTooLongError("x")), lambda client: client.chat(HELLO))
    assert sleeps == []


def test_the_timeout_covers_all_tries():
    handler = Flaky(*(errors.UnavailableError("x") for _ in range(50)))
    with pytest.raises(errors.UnavailableError):
        use(handler, lambda client: client.with_options(timeout=0.05, max_retries=40).models())
    with pytest.raises(errors.DeadlineExceededError):
        use(handler, lambda client: client.models(), timeout=0.0)


@given(st.integers(1, 100), st.floats(0, 1), st.floats(0.001, 1000))
def test_waits_are_bounded_and_end_in_time(failures, jitter, left_s):
    wait = delay_s(errors.UnavailableError("x"), failures, 100, left_s, lambda: jitter)
    assert wait is None or (0.25 <= wait <= 8 and wait < left_s)


def test_a_server_that_asks_for_too_long_is_left_alone():
    error = errors.OverloadedError("full", retry_after_s=121)
    assert delay_s(error, 1, 5, 1000.0) is None
    assert delay_s(errors.OverloadedError("full", retry_after_s=119), 1, 5, 1000.0) == 119


def test_the_other_calls():
    answers = {
        "Tokenize": pb.TokenizeResponse(token_ids=b"\x01\0\0\0\x02\0\0\0", tokens=2, prompt="hi"),
        "Detokenize": pb.DetokenizeResponse(text="hi"),
        "ExplainRoute": pb.ExplainRouteResponse(
            candidates=[
                pb.RouteCandidate(engine="e1", predicted_ttft=seconds(0.5), prefill=seconds(0.5), home=True),
                pb.RouteCandidate(engine="e0", excluded="draining"),
            ],
            prompt_tokens=130,
            blocks=2,
            reason="home of this prefix",
        ),
    }

    async def scenario(client):
        assert (await client.tokenize("hi")).ids == (1, 2)
        assert (await client.tokenize(messages=HELLO)).prompt == "hi"
        assert await client.detokenize([1, 2]) == "hi"
        route = await client.explain_route(messages=HELLO, prompt_cache_key="k")
        assert [candidate.engine for candidate in route.candidates] == ["e1", "e0"]
        assert (route.candidates[0].predicted_ttft_s, route.candidates[1].excluded) == (0.5, "draining")

    _, transport = use(lambda method, _: answers[method], scenario)
    assert transport.calls[-1][1].options.prompt_cache_key == "k"


def test_public_names():
    public = {name for name in vars(katydid_client) if not name.startswith("_")}
    modules = {"blocking", "client", "retry", "stream", "transport", "types", "wire"}
    assert public - modules == set(katydid_client.__all__)
    assert katydid_client.__all__ == sorted(katydid_client.__all__)
