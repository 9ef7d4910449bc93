"""A running answer: events as they arrive, and the whole at the end.

    async with client.chat_stream(messages) as stream:
        async for event in stream:
            print(event.text, end="")
        completion = await stream.get_final()

The request is sent with the first read and cancelled when the block is left early, so a consumer that breaks out of
the loop costs the server nothing more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Self

from katydid_runtime.errors import InternalError

from katydid_client.types import Choice, Completion, Event, FinishReason, TokenLogprob, ToolCall

__all__ = ["CompletionStream"]


class CompletionStream:
    """Async context manager and async iterator of `Event`. Errors of katydid_runtime.errors, also in mid-stream.

    `open_events` starts the request and returns its events; it retries what may be retried before the first of them.
    """

    def __init__(self, open_events: Callable[[], AsyncGenerator[Event, None]]) -> None:
        self._open_events = open_events
        self._events: AsyncGenerator[Event, None] | None = None
        self._gathered = Gathering()

    async def __aenter__(self) -> Self:
        self._events = self._open_events()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._events is not None:
            await self._events.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._events is None:
            raise RuntimeError("a stream is used inside `async with`")
        event = await anext(self._events)
        self._gathered.add(event)
        return event

    @property
    def text_so_far(self) -> str:
        """Text of answer 0 received until now."""
        return self._gathered.text(0)

    async def get_final(self) -> Completion:
        """Read what is left and return the whole, however many events were read before."""
        async for _ in self:
            pass
        return self._gathered.completion()


class Gathering:
    """Puts events together into a Completion."""

    def __init__(self) -> None:
        self._events: dict[int, list[Event]] = {}
        self._last: Event | None = None

    def add(self, event: Event) -> None:
        self._events.setdefault(event.index, []).append(event)
        if event.usage is not None:
            self._last = event

    def text(self, index: int) -> str:
        return "".join(event.text for event in self._events.get(index, ()))

    def completion(self) -> Completion:
        """Raises InternalError when the stream ended without finish reason or usage: a truncated answer is none."""
        last = self._last
        if last is None or last.usage is None or last.timing is None:
            raise InternalError("the stream ended without its last event")
        choices = tuple(_choice(index, self._events[index]) for index in sorted(self._events))
        return Completion(last.request_id, choices, last.usage, last.timing, last.prompt_logprobs)


def _choice(index: int, events: Iterable[Event]) -> Choice:
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason | None = None
    for event in events:
        text.append(event.text)
        reasoning.append(event.reasoning)
        calls.extend(event.tool_calls)
        token_ids.extend(event.token_ids)
        logprobs.extend(event.logprobs)
        finish_reason = event.finish_reason or finish_reason
    if finish_reason is None:
        raise InternalError(f"answer {index} ended without a finish reason")
    return Choice(
        index=index,
        text="".join(text),
        finish_reason=finish_reason,
        reasoning="".join(reasoning),
        tool_calls=_joined(calls),
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
    )


def _joined(parts: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """Parts of tool calls with equal index, put together in order."""
    calls: dict[int, ToolCall] = {}
    for part in parts:
        known = calls.get(part.index, ToolCall(index=part.index))
        calls[part.index] = ToolCall(
            known.name + part.name, known.arguments + part.arguments, known.id or part.id, part.index
        )
    return tuple(calls[index] for index in sorted(calls))
