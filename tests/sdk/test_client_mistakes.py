"""What is asked wrongly is named, with what is allowed, before anything is sent."""

from __future__ import annotations

import asyncio
import math

import pytest
from katydid.gateway.v1 import gateway_pb2 as pb
from katydid_client import AsyncKatydid, Katydid, MockTransport
from katydid_runtime import errors

HELLO = [{"role": "user", "content": "Hello"}]
ANSWER = [pb.ChatResponse(finish_reason=pb.FINISH_REASON_STOP, usage=pb.Usage(), timing=pb.Timing())]


@pytest.mark.parametrize(
    ("messages", "arguments", "field"),
    [
        (HELLO, {"temprature": 1}, "temprature"),
        (HELLO, {"temperature": "hot"}, "temperature"),
        (HELLO, {"max_tokens": -1}, "max_tokens"),
        (HELLO, {"regex": "a", "grammar": "b"}, "regex"),
        (HELLO, {"tools": [{"function": {}}]}, "tools[0].name"),
        ([*HELLO, {"role": "wizard", "content": "x"}], {}, "messages[1].role"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages[0].content"),
        ("hello", {}, "messages[0]"),
        (None, {}, "messages"),
        ([{"role": "assistant", "tool_calls": ["f"]}], {}, "messages[0].tool_calls[0]"),
        (HELLO, {"tools": ["f"]}, "tools[0]"),
        (HELLO, {"tools": [{"function": "f"}]}, "tools[0].function"),
        (HELLO, {"tool_choice": {"type": "auto"}}, "tool_choice"),
        (HELLO, {"model": 5}, "model"),
    ],
)
def test_a_mistake_is_named_before_anything_is_sent(messages, arguments, field):
    transport = MockTransport(lambda *_: ANSWER)
    with pytest.raises(errors.InvalidRequestError) as caught:
        AsyncKatydid(transport=transport).chat_stream(messages, **arguments)
    assert caught.value.field == field
    assert transport.calls == []


def test_a_number_out_of_range_is_told_with_the_range():
    with pytest.raises(errors.InvalidRequestError) as caught:
        AsyncKatydid(transport=MockTransport(lambda *_: ANSWER)).chat_stream(HELLO, max_tokens=-1)
    assert caught.value.allowed == "integers of 0 to 4294967295"


@pytest.mark.parametrize("timeout", [math.nan, "x", None])
def test_a_timeout_is_a_number(timeout):
    with pytest.raises(errors.InvalidRequestError) as caught:
        AsyncKatydid(transport=MockTransport(lambda *_: ANSWER), timeout=timeout)
    assert (caught.value.field, caught.value.allowed) == ("timeout", "a number of seconds")


def test_a_timeout_without_end_is_no_deadline_that_has_passed():
    asked = []

    class Asked(MockTransport):
        def stream(self, method, request, *, metadata, timeout_s):
            asked.append(timeout_s)
            return super().stream(method, request, metadata=metadata, timeout_s=timeout_s)

    async def scenario():
        async with AsyncKatydid(transport=Asked(lambda *_: ANSWER), timeout=math.inf) as client:
            await client.chat(HELLO)

    asyncio.run(scenario())
    assert asked == [366 * 86_400]


def test_generate_refuses_what_only_chat_knows():
    with pytest.raises(errors.InvalidRequestError, match="unknown argument tools"):
        AsyncKatydid(transport=MockTransport(lambda *_: [])).generate_stream("x", tools=[])


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"]])
def test_ids_out_of_range_are_refused(ids):
    with pytest.raises(errors.InvalidRequestError, match="token ids"):
        AsyncKatydid(transport=MockTransport(lambda *_: [])).generate_stream(ids)


def test_a_client_that_is_closed_says_so():
    async def scenario():
        client = AsyncKatydid("127.0.0.1:1")
        await client.close()
        for call in (client.models, lambda: client.chat(HELLO)):
            with pytest.raises(errors.ConflictError, match="this client is closed"):
                await call()

    asyncio.run(scenario())
    blocking = Katydid("127.0.0.1:1")
    blocking.close()
    with pytest.raises(errors.ConflictError, match="this client is closed"):
        blocking.models()
    with pytest.raises(errors.ConflictError), blocking.chat_stream(HELLO):
        pass
