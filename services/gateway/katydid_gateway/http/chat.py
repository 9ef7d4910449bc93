"""POST /v1/chat/completions: a conversation in, one object or a stream of chunks out, in the form of OpenAI's API."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
from katydid_runtime.block_hash import unpack_ids

from katydid_gateway.answer import Answer
from katydid_gateway.generation import Generator
from katydid_gateway.http.exchange import Exchange
from katydid_gateway.http.failures import decode_body
from katydid_gateway.http.schema import ChatCompletionBody
from katydid_gateway.http.translate import chat_request
from katydid_gateway.http.usage import timing_fields, usage_fields
from katydid_gateway.requests import Caller, Delta, FinishReason, TokenLogprob, ToolCall

__all__ = ["ChatCompletions"]

_decoder = msgspec.json.Decoder(ChatCompletionBody)
_encode = msgspec.json.Encoder().encode


class ChatCompletions:
    """The endpoint's work behind authentication and error handling."""

    api = "chat"

    def __init__(self, generator: Generator, keepalive_s: float) -> None:
        self._generator = generator
        self._keepalive_s = keepalive_s

    async def handle(self, exchange: Exchange, raw: bytes, caller: Caller) -> None:
        body = decode_body(_decoder, raw)
        request = chat_request(body, exchange.request_id)
        async with self._generator.answer(request, caller, self.api) as answer:
            shape = _Shape(answer, body)
            writing = self._stream(exchange, answer, shape) if body.stream else self._whole(exchange, answer, shape)
            await exchange.while_connected([answer], writing)

    async def _stream(self, exchange: Exchange, answer: Answer, shape: _Shape) -> None:
        async for batch in answer.batches(self._keepalive_s):
            # The head waits for the first output, so that a request an engine refuses still gets its own status.
            if not exchange.started:
                await exchange.start_events()
            content = b"".join([shape.chunk(delta) for delta in batch]) if batch else b": keep-alive\n\n"
            if content:
                await exchange.write(content)
        await exchange.write(shape.last_chunks())
        await exchange.end()

    async def _whole(self, exchange: Exchange, answer: Answer, shape: _Shape) -> None:
        async for batch in answer.batches():
            for delta in batch:
                shape.collect(delta)
        await exchange.send_json(shape.whole())


class _Shape:
    """Deltas of one answer in OpenAI's words."""

    def __init__(self, answer: Answer, body: ChatCompletionBody) -> None:
        self._answer = answer
        self._with_logprobs = bool(body.logprobs)
        self._with_ids = bool(body.return_token_ids)
        self._include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._begun: set[int] = set()
        self._collected: dict[int, Delta] = {}
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{answer.request_id}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": answer.model,
        }
        self._tail: dict[str, Any] = {"usage": None} if self._include_usage else {}

    def chunk(self, delta: Delta) -> bytes:
        """The events of one delta; b"" when it has nothing to show yet."""
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
            events.append(self._event(delta.index, {"role": "assistant", "content": ""}, None))
        if fields or delta.logprobs or (self._with_ids and delta.ids):
            events.append(self._event(delta.index, fields, None, delta))
        if delta.finish is not None:
            events.append(self._event(delta.index, {}, delta.finish))
        return b"".join(events)

    def last_chunks(self) -> bytes:
        """The usage chunk when it was asked for, and the end mark."""
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        return b"data: " + _encode(self._head | {"choices": []} | self._account()) + b"\n\ndata: [DONE]\n\n"

    def collect(self, delta: Delta) -> None:
        """Keep a delta for `whole`."""
        known = self._collected.setdefault(delta.index, Delta(delta.index))
        known.text += delta.text
        known.reasoning += delta.reasoning
        known.tool_calls += delta.tool_calls
        known.logprobs += delta.logprobs
        known.ids += delta.ids
        known.finish = delta.finish or known.finish

    def whole(self) -> bytes:
        choices = [self._choice(self._collected[index]) for index in sorted(self._collected)]
        return _encode(self._head | {"choices": choices} | self._account())

    def _choice(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text or None, "refusal": None}
        calls = _whole_calls(delta.tool_calls)
        if calls:
            message["tool_calls"] = calls
        else:
            message["content"] = delta.text
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        return {"index": delta.index, "message": message, "finish_reason": delta.finish} | self._extras(delta)

    def _event(
        self, index: int, fields: dict[str, Any], finish: FinishReason | None, delta: Delta | None = None
    ) -> bytes:
        choice = {"index": index, "delta": fields, "finish_reason": finish}
        if delta is not None:
            choice |= self._extras(delta)
        return b"data: " + _encode(self._head | {"choices": [choice]} | self._tail) + b"\n\n"

    def _extras(self, delta: Delta) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": None}
        if self._with_logprobs:
            extras["logprobs"] = {"content": [_logprob(entry) for entry in delta.logprobs], "refusal": None}
        if self._with_ids:
            extras["token_ids"] = unpack_ids(delta.ids).tolist()
        return extras

    def _account(self) -> dict[str, Any]:
        result = self._answer.result
        return {"usage": usage_fields(result.usage), "timing": timing_fields(result.timing)}


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
    # JSON has no -inf: -9999 is what OpenAI sends for it.
    return {"token": entry.text, "logprob": max(entry.logprob, -9999.0), "bytes": list(entry.raw)}
