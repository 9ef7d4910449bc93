"""The blocking twin of the client: same arguments, same results, same errors."""

from __future__ import annotations

import threading
from inspect import signature

import pytest
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid_client import AsyncKatydid, Katydid, MockTransport
from katydid_runtime import errors

from tests.sdk.test_client import ANSWER, HELLO, Flaky


def test_the_blocking_twin():
    with Katydid(transport=MockTransport(lambda *_: ANSWER)) as client:
        assert client.chat(HELLO).text == "Hi there"
        with client.chat_stream(HELLO) as stream:
            assert [event.text for event in stream] == ["Hi", " there"]
            assert stream.get_final().usage.completion_tokens == 2
    client.close()


@pytest.mark.parametrize(
    "call", ["chat", "chat_stream", "generate", "generate_stream", "tokenize", "detokenize", "models", "explain_route"]
)
def test_the_blocking_twin_takes_the_same_arguments(call):
    assert _arguments(getattr(Katydid, call)) == _arguments(getattr(AsyncKatydid, call))


def _arguments(method):
    return [(argument.name, argument.kind, argument.default) for argument in signature(method).parameters.values()]


def test_the_blocking_twin_passes_every_argument_on():
    transport = MockTransport(
        lambda method, _: pb.ExplainRouteResponse() if method == "ExplainRoute" else pb.TokenizeResponse()
    )
    with Katydid(transport=transport) as client:
        client.explain_route(messages=HELLO, without_engine="e0", prompt_cache_key="k")
        client.tokenize(messages=HELLO, tools=[{"type": "function", "function": {"name": "look"}}])
    explained, tokenized = (request for _, request, _ in transport.calls)
    assert (explained.without_engine, explained.options.prompt_cache_key) == ("e0", "k")
    assert [tool.name for tool in tokenized.tools] == ["look"]


def test_the_blocking_twin_raises_the_same_errors():
    with Katydid(transport=MockTransport(Flaky(errors.UnknownModelError("no m")))) as client:
        with pytest.raises(errors.UnknownModelError):
            client.chat(HELLO)
        assert client.models()[0].id == "m"


def test_a_client_that_could_not_be_made_leaves_no_thread_behind():
    with pytest.raises(errors.InvalidRequestError):
        Katydid(timeout=float("nan"))
    assert "katydid-client" not in [thread.name for thread in threading.enumerate()]
