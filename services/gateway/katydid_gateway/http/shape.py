"""How endpoints give their answers: deltas as they come in a stream of events, or collected into one object.

An endpoint's own words are its `Form`; `Shape` is what the forms of the two completions endpoints have in common.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Protocol

import msgspec

from katydid_gateway.answer import Answer
from katydid_gateway.http.exchange import Exchange
from katydid_gateway.http.merge import merged
from katydid_gateway.http.schema import StreamOptions
from katydid_gateway.http.usage import usage_fields
from katydid_gateway.requests import Delta, Usage

__all__ = ["Form", "Shape", "finite_logprob", "send_answers"]

_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0

_encode = msgspec.json.Encoder().encode


class Form(Protocol):
    """Deltas of one request in one endpoint's words; `place` is the place of the answer among those of the request."""

    def chunk(self, place: int, delta: Delta) -> bytes:
        """The events of one delta; b"" when it has nothing to show yet."""

    def last_events(self) -> bytes:
        """What a stream ends with, once all answers have ended."""

    def collect(self, place: int, delta: Delta) -> None:
        """Keep a delta for `whole`."""

    def whole(self) -> bytes:
        """All that was collected, as one object."""


class Shape(ABC):
    """The form of OpenAI's completions: every event and the object are a head and a list of choices."""

    def __init__(self, *, id: str, object: str, model: str, stream_options: StreamOptions | None) -> None:
        self._include_usage = stream_options is not None and stream_options.include_usage
        self._counts = self._include_usage and stream_options is not None and stream_options.continuous_usage_stats
        self._collected: dict[tuple[int, int], Delta] = {}
        self._head: dict[str, Any] = {"id": id, "object": object, "created": int(time.time()), "model": model}
        self._tail: dict[str, Any] = {"usage": None} if self._include_usage else {}

    @abstractmethod
    def chunk(self, place: int, delta: Delta) -> bytes:
        """The events of one delta; b"" when it has nothing to show yet."""

    @abstractmethod
    def choice(self, place: int, delta: Delta) -> dict[str, Any]:
        """A complete choice."""

    @abstractmethod
    def used(self) -> Usage:
        """What was used so far."""

    @abstractmethod
    def account(self) -> dict[str, Any]:
        """Usage and timing, once all answers have ended."""

    def event(self, choice: dict[str, Any]) -> bytes:
        tail = {"usage": usage_fields(self.used())} if self._counts else self._tail
        return b"data: " + _encode(self._head | {"choices": [choice]} | tail) + b"\n\n"

    def last_events(self) -> bytes:
        """The usage chunk when it was asked for, and the end mark."""
        if not self._include_usage:
            return _DONE
        return b"data: " + _encode(self._head | {"choices": []} | self.account()) + b"\n\n" + _DONE

    def collect(self, place: int, delta: Delta) -> None:
        """Keep a delta for `whole`."""
        known = self._collected.setdefault((place, delta.index), Delta(delta.index))
        known.text += delta.text
        known.reasoning += delta.reasoning
        known.tool_calls += delta.tool_calls
        known.logprobs += delta.logprobs
        known.ids += delta.ids
        known.finish = delta.finish or known.finish

    def whole(self) -> bytes:
        """All that was collected, as one object."""
        choices = [self.choice(place, delta) for (place, _), delta in sorted(self._collected.items())]
        return _encode(self._head | {"choices": choices} | self.account())


async def send_answers(
    exchange: Exchange, answers: list[Answer], form: Form, *, stream: bool, keepalive_s: float
) -> None:
    """Write `answers` to the client, as a stream of events or as one object.

    Raises what the answers fail with, RequestAbortedError when the client has left.
    """
    writing = _stream(exchange, answers, form, keepalive_s) if stream else _whole(exchange, answers, form)
    await exchange.while_connected(answers, writing)


async def _stream(exchange: Exchange, answers: list[Answer], form: Form, keepalive_s: float) -> None:
    if len(answers) == 1:
        await _stream_one(exchange, answers[0], form, keepalive_s)
        return
    async for place, batch in merged(answers, keepalive_s):
        # The head waits for the first output, so that a request an engine refuses still gets its own status.
        if not exchange.started:
            await exchange.start_events()
        content = b"".join([form.chunk(place, delta) for delta in batch]) if batch else _KEEP_ALIVE
        if content:
            await exchange.write(content)
    await exchange.end(form.last_events())


async def _stream_one(exchange: Exchange, answer: Answer, form: Form, keepalive_s: float) -> None:
    """The same for one answer, of which nearly all are; its last output and the end are one write."""
    async for batch in answer.batches(keepalive_s):
        if not exchange.started:
            await exchange.start_events()
        content = b"".join([form.chunk(0, delta) for delta in batch]) if batch else _KEEP_ALIVE
        if answer.ended:
            await exchange.end(content + form.last_events())
            return
        if content:
            await exchange.write(content)
    await exchange.end(form.last_events())


async def _whole(exchange: Exchange, answers: list[Answer], form: Form) -> None:
    async for place, batch in merged(answers):
        for delta in batch:
            form.collect(place, delta)
    await exchange.send_json(form.whole())


def finite_logprob(logprob: float) -> float:
    """JSON has no -inf: -9999 is what OpenAI sends for it."""
    return max(logprob, _LEAST_LOGPROB)
