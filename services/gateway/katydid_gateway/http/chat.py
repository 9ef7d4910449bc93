"""POST /v1/chat/completions: a conversation in, one object or a stream of chunks out, in the form of OpenAI's API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from katydid_runtime.block_hash import unpack_ids

from katydid_gateway.answer import Answer
from katydid_gateway.generation import Generator
from katydid_gateway.http.exchange import Exchange
from katydid_gateway.http.failures import decode_body
from katydid_gateway.http.schema import ChatCompletionBody
from katydid_gateway.http.shape import Shape, finite_logprob, send_answers
from katydid_gateway.http.translate import chat_request
from katydid_gateway.http.usage import timing_fields, usage_fields
from katydid_gateway.requests import Caller, Delta, TokenLogprob, ToolCall, Usage

__all__ = ["ChatCompletions"]

_decoder = msgspec.json.Decoder(ChatCompletionBody)
_encode = msgspec.json.Encoder().encode
_SPELLED = {"prompt": "messages"}
_SPELLED_NEWLY = {"prompt": "messages", "max_tokens": "max_completion_tokens"}
# No caller's id and no model's name has it.
_ANY_TEXT = "\0text"


class ChatCompletions:
    """The endpoint's work behind authentication and error handling."""

    api = "chat"

    def __init__(self, generator: Generator, keepalive_s: float) -> None:
        self._generator = generator
        self._keepalive_s = keepalive_s

    async def handle(self, exchange: Exchange, raw: bytes, caller: Caller) -> None:
        body = decode_body(_decoder, raw)
        exchange.spelled = _SPELLED if body.max_completion_tokens is None else _SPELLED_NEWLY
        request = chat_request(body, exchange.named(body.request_id))
        async with self._generator.answer(request, caller, self.api) as answer:
            shape = _Shape(answer, body)
            await send_answers(exchange, [answer], shape, stream=bool(body.stream), keepalive_s=self._keepalive_s)


class _Shape(Shape):
    """Deltas of a conversation's answer: first the role, then what is said, thought and called, then why it ends."""

    def __init__(self, answer: Answer, body: ChatCompletionBody) -> None:
        super().__init__(
            id=f"chatcmpl-{answer.request_id}",
            object="chat.completion.chunk" if body.stream else "chat.completion",
            model=answer.model,
            stream_options=body.stream_options,
        )
        self._answer = answer
        self._with_logprobs = bool(body.logprobs)
        self._with_ids = bool(body.return_token_ids)
        self._begun: set[int] = set()
        self._plain: dict[int, tuple[bytes, bytes]] = {}

    def chunk(self, _place: int, delta: Delta) -> bytes:
        more = delta.reasoning or delta.tool_calls or delta.finish or self._with_logprobs or self._with_ids
        if delta.text and not (more or self._counts) and delta.index in self._begun:
            return self._text(delta.index, delta.text)
        fields: dict[str, Any] = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.text:
            fields["content"] = delta.text
        if delta.tool_calls:
            fields["tool_calls"] = [_call_part(call) for call in _joined(delta.tool_calls)]
        events = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            events.append(self._part(delta.index, {"role": "assistant", "content": ""}))
        if fields or delta.logprobs or (self._with_ids and delta.ids):
            events.append(self._part(delta.index, fields, self._extras(delta)))
        if delta.finish is not None:
            events.append(self._part(delta.index, {}, {"finish_reason": delta.finish}))
        return b"".join(events)

    def _text(self, index: int, text: str) -> bytes:
        """The event of most tokens: all but the text is the same every time."""
        around = self._plain.get(index)
        if around is None:
            event = self._part(index, {"content": _ANY_TEXT}, {"logprobs": None})
            before, _, after = event.partition(_encode(_ANY_TEXT))
            around = self._plain[index] = (before, after)
        return around[0] + _encode(text) + around[1]

    def choice(self, _place: int, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text or None, "refusal": None}
        calls = _whole_calls(delta.tool_calls)
        if calls:
            message["tool_calls"] = calls
        else:
            message["content"] = delta.text
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        return {"index": delta.index, "message": message, "finish_reason": delta.finish} | self._extras(delta)

    def used(self) -> Usage:
        return self._answer.usage

    def account(self) -> dict[str, Any]:
        result = self._answer.result
        return {"usage": usage_fields(result.usage), "timing": timing_fields(result.timing)}

    def _part(self, index: int, fields: dict[str, Any], extras: dict[str, Any] | None = None) -> bytes:
        return self.event({"index": index, "delta": fields, "finish_reason": None} | (extras or {}))

    def _extras(self, delta: Delta) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": None}
        if self._with_logprobs:
            extras["logprobs"] = {"content": [_logprob(entry) for entry in delta.logprobs], "refusal": None}
        if self._with_ids:
            extras["token_ids"] = unpack_ids(delta.ids).tolist()
        return extras


def _joined(parts: list[ToolCall]) -> list[ToolCall]:
    """One part a call: some clients keep only the first part of a call that a chunk holds."""
    joined: dict[int, ToolCall] = {}
    for part in parts:
        known = joined.get(part.index)
        joined[part.index] = part if known is None else replace(known, arguments=known.arguments + part.arguments)
    return list(joined.values())


def _call_part(call: ToolCall) -> dict[str, Any]:
    # Keys that say nothing new are left out: clients break on `"name": null` in later parts.
    if call.id:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _whole_calls(parts: list[ToolCall]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.id:
            calls[part.index] = {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}}
        calls[part.index]["function"]["arguments"] += part.arguments
    return [calls[index] for index in sorted(calls)]


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return _logprob_fields(entry) | {"top_logprobs": [_logprob_fields(other) for other in entry.top]}


def _logprob_fields(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": finite_logprob(entry.logprob), "bytes": list(entry.raw)}
