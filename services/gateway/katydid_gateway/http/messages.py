"""POST /v1/messages: Anthropic's Messages API, streaming and whole, in front of the pipeline of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from katydid_runtime.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    KatydidError,
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    PermissionDeniedError,
    QuotaExceededError,
    UnauthenticatedError,
    UnavailableError,
)

from katydid_gateway.answer import Answer
from katydid_gateway.generation import Generator
from katydid_gateway.http.blocks import Block, BlockForm, BlockKind
from katydid_gateway.http.exchange import Exchange
from katydid_gateway.http.failures import ErrorWords, decode_body
from katydid_gateway.http.messages_schema import CountTokensBody, MessagesBody
from katydid_gateway.http.messages_translate import conversation, messages_request
from katydid_gateway.http.shape import send_answers
from katydid_gateway.http.usage import timing_fields
from katydid_gateway.json_text import INVALID_JSON
from katydid_gateway.requests import Caller, FinishReason, Usage

__all__ = ["ANTHROPIC_ERRORS", "CountTokens", "Messages"]

_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountTokensBody)
_arguments_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode
_SPELLED = {"prompt": "messages", "stop": "stop_sequences"}

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.ABORT: "end_turn",
}
_ERROR_TYPES: tuple[tuple[type[KatydidError], str], ...] = (
    (PayloadTooLargeError, "request_too_large"),
    (InvalidRequestError, "invalid_request_error"),
    (UnauthenticatedError, "authentication_error"),
    (PermissionDeniedError, "permission_error"),
    (NotFoundError, "not_found_error"),
    (QuotaExceededError, "rate_limit_error"),
    (OverloadedError, "overloaded_error"),
    (UnavailableError, "overloaded_error"),
    (DeadlineExceededError, "timeout_error"),
)


def _error(error: KatydidError) -> bytes:
    kind = next((name for cls, name in _ERROR_TYPES if isinstance(error, cls)), "api_error")
    # Anthropic's object has no place of its own for what is allowed.
    allowed = f"; allowed: {error.allowed}" if error.allowed and error.allowed not in error.message else ""
    return _encode({"type": "error", "error": {"type": kind, "message": error.message + allowed}})


ANTHROPIC_ERRORS = ErrorWords(_error, lambda error: b"event: error\ndata: " + _error(error) + b"\n\n")


class Messages:
    """The endpoint's work behind authentication and error handling."""

    api = "messages"

    def __init__(self, generator: Generator, keepalive_s: float) -> None:
        self._generator = generator
        self._keepalive_s = keepalive_s

    async def handle(self, exchange: Exchange, raw: bytes, caller: Caller) -> None:
        body = decode_body(_decoder, raw)
        exchange.spelled = _SPELLED
        request = messages_request(body, exchange.named(None))
        async with self._generator.answer(request, caller, self.api) as answer:
            form = _Form(answer)
            await send_answers(exchange, [answer], form, stream=bool(body.stream), keepalive_s=self._keepalive_s)


class CountTokens:
    """POST /v1/messages/count_tokens: how long the prompt would be."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def handle(self, exchange: Exchange, raw: bytes, _caller: Caller) -> None:
        body = decode_body(_count_decoder, raw)
        encoded = await self._generator.encode(body.model, conversation(body))
        await exchange.send_json(_encode({"input_tokens": encoded.tokens}))


class _Form(BlockForm):
    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def begun(self) -> bytes:
        # Usage is known so far: what the caches held came with the first token.
        return _event("message_start", message=self._message() | {"usage": _usage(self._answer.usage)})

    def opened(self, block: Block) -> bytes:
        return _event("content_block_start", index=block.index, content_block=_content(block, {}))

    def grown(self, block: Block, text: str) -> bytes:
        match block.kind:
            case BlockKind.REASONING:
                delta = {"type": "thinking_delta", "thinking": text}
            case BlockKind.TEXT:
                delta = {"type": "text_delta", "text": text}
            case BlockKind.CALL:
                delta = {"type": "input_json_delta", "partial_json": text}
        return _event("content_block_delta", index=block.index, delta=delta)

    def closed(self, block: Block) -> bytes:
        return _event("content_block_stop", index=block.index)

    def last_events(self) -> bytes:
        result = self._answer.result
        return _event(
            "message_delta", delta=self._stop(), usage=_usage(result.usage), timing=timing_fields(result.timing)
        ) + _event("message_stop")

    def whole(self) -> bytes:
        result = self._answer.result
        content = [_content(block, _arguments(block.text)) for block in self.blocks]
        account = {"usage": _usage(result.usage), "timing": timing_fields(result.timing)}
        return _encode(self._message() | {"content": content} | self._stop() | account)

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._answer.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _stop(self) -> dict[str, Any]:
        if self.stop_string is not None and self.finish is FinishReason.STOP:
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop_string}
        return {"stop_reason": _STOP_REASONS[self.finish or FinishReason.STOP], "stop_sequence": None}


def _content(block: Block, arguments: Mapping[str, object]) -> dict[str, Any]:
    match block.kind:
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case BlockKind.TEXT:
            return {"type": "text", "text": block.text}
        case BlockKind.CALL:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def _arguments(text: str) -> Mapping[str, object]:
    """A call's arguments as the model wrote them; where it was cut off or wrote no object, its text under one name."""
    try:
        return _arguments_decoder.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {INVALID_JSON: text}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic's account: cached tokens are not part of input_tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached.total,
        "cache_read_input_tokens": usage.cached.total,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: ".encode() + _encode({"type": kind} | fields) + b"\n\n"
