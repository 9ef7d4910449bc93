"""The pace of a template is learnt, and decides who renders."""

from __future__ import annotations

import json
import time

import pytest
from katydid_gateway.requests import Conversation, Message, Role, ToolCall
from katydid_gateway.text.render_pace import RenderPace, weight_of


def busy(seconds: float) -> str:
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass
    return "done"


def test_short_conversations_first_then_what_is_quick() -> None:
    pace = RenderPace()
    assert (pace.inline(1), pace.inline(100)) == (True, False)
    assert pace.timed(100, lambda: "x") == "x"
    assert pace.inline(100)
    for _ in range(40):
        assert pace.timed(1, lambda: busy(0.003)) == "done"
    assert not pace.inline(1)
    for _ in range(40):
        pace.timed(1000, lambda: busy(0.001))
    assert pace.inline(100)


def test_arguments_of_calls_weigh_too() -> None:
    call = ToolCall(0, "c", "f", json.dumps({str(number): number for number in range(10_000)}))
    conversation = Conversation(messages=(Message(Role.USER, "x"), Message(Role.ASSISTANT, tool_calls=(call,))))
    assert weight_of(conversation) > 1000
    assert not RenderPace().inline(weight_of(conversation))


def test_what_fails_is_timed_too() -> None:
    pace = RenderPace()
    with pytest.raises(ZeroDivisionError):
        pace.timed(1, lambda: 1 / 0)
    assert pace.inline(1)
