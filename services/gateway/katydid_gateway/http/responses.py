"""POST /v1/responses: OpenAI's Responses API without server-side conversations, in front of the same pipeline."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from katydid_runtime.errors import KatydidError

from katydid_gateway.answer import Answer
from katydid_gateway.generation import Generator
from katydid_gateway.http.blocks import Block, BlockForm, BlockKind
from katydid_gateway.http.exchange import Exchange
from katydid_gateway.http.failures import OPENAI_ERRORS, ErrorWords, decode_body, error_detail
from katydid_gateway.http.responses_schema import ResponsesBody
from katydid_gateway.http.responses_translate import responses_request
from katydid_gateway.http.shape import send_answers
from katydid_gateway.http.usage import timing_fields, usage_fields
from katydid_gateway.requests import Caller, FinishedRequest, FinishReason

__all__ = ["RESPONSES_ERRORS", "Responses"]

_decoder = msgspec.json.Decoder(ResponsesBody)
_encode = msgspec.json.Encoder().encode
_SPELLED = {"prompt": "input", "max_tokens": "max_output_tokens"}


def _error_event(error: KatydidError) -> bytes:
    detail = error_detail(error)
    # The flat fields are the API's; the object under "error" is what makes its clients raise.
    fields = {"type": "error", "error": detail} | {name: detail[name] for name in ("code", "message", "param")}
    return b"event: error\ndata: " + _encode(fields) + b"\n\n"


RESPONSES_ERRORS = ErrorWords(OPENAI_ERRORS.body, _error_event)


class Responses:
    """The endpoint's work behind authentication and error handling."""

    api = "responses"

    def __init__(self, generator: Generator, keepalive_s: float) -> None:
        self._generator = generator
        self._keepalive_s = keepalive_s

    async def handle(self, exchange: Exchange, raw: bytes, caller: Caller) -> None:
        body = decode_body(_decoder, raw)
        exchange.spelled = _SPELLED
        request = responses_request(body, exchange.named(None))
        async with self._generator.answer(request, caller, self.api) as answer:
            form = _Form(answer, body)
            await send_answers(exchange, [answer], form, stream=bool(body.stream), keepalive_s=self._keepalive_s)


class _Form(BlockForm):
    """Every block is an output item: a reasoning, a message with one text part, or a function call."""

    def __init__(self, answer: Answer, body: ResponsesBody) -> None:
        super().__init__()
        self._answer = answer
        self._body = body
        self._created = int(time.time())
        self._number = -1

    def begun(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def opened(self, block: Block) -> bytes:
        event = self._event(
            "response.output_item.added", output_index=block.index, item=self._item(block, "in_progress", whole=False)
        )
        if block.kind is BlockKind.TEXT:
            event += self._part("response.content_part.added", block, part=_text_part(""))
        elif block.kind is BlockKind.REASONING:
            event += self._part("response.content_part.added", block, part={"type": "reasoning_text", "text": ""})
        return event

    def grown(self, block: Block, text: str) -> bytes:
        match block.kind:
            case BlockKind.TEXT:
                return self._part("response.output_text.delta", block, delta=text, logprobs=[])
            case BlockKind.REASONING:
                return self._part("response.reasoning_text.delta", block, delta=text)
            case BlockKind.CALL:
                return self._of_item("response.function_call_arguments.delta", block, delta=text)

    def closed(self, block: Block) -> bytes:
        match block.kind:
            case BlockKind.TEXT:
                event = self._part("response.output_text.done", block, text=block.text, logprobs=[])
                event += self._part("response.content_part.done", block, part=_text_part(block.text))
            case BlockKind.REASONING:
                part = {"type": "reasoning_text", "text": block.text}
                event = self._part("response.reasoning_text.done", block, text=block.text)
                event += self._part("response.content_part.done", block, part=part)
            case BlockKind.CALL:
                event = self._of_item(
                    "response.function_call_arguments.done", block, name=block.name, arguments=block.text
                )
        item = self._item(block, self._status(block), whole=True)
        return event + self._event("response.output_item.done", output_index=block.index, item=item)

    def last_events(self) -> bytes:
        response = self._finished()
        return self._event(f"response.{response['status']}", response=response)

    def whole(self) -> bytes:
        return _encode(self._finished())

    def _finished(self) -> dict[str, Any]:
        cut = self.finish is FinishReason.LENGTH
        output = [self._item(block, self._status(block), whole=True) for block in self.blocks]
        return self._response("incomplete" if cut else "completed", output, self._answer.result)

    def _response(
        self, status: str, output: list[dict[str, Any]] | None = None, result: FinishedRequest | None = None
    ) -> dict[str, Any]:
        body = self._body
        fields = {
            "id": f"resp_{self._answer.request_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._answer.model,
            "output": output or [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
        if result is not None:
            fields |= {"usage": _usage(result), "timing": timing_fields(result.timing)}
        return fields

    def _status(self, block: Block) -> str:
        """Clients make a call that is said to be complete: one that was cut off must not be."""
        cut = self.finish is FinishReason.LENGTH and block is self.blocks[-1]
        return "incomplete" if cut and not (block.kind is BlockKind.CALL and _is_json(block.text)) else "completed"

    def _item(self, block: Block, status: str, *, whole: bool) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        match block.kind:
            case BlockKind.TEXT:
                content = [_text_part(block.text)] if whole else []
                return item | {"type": "message", "role": "assistant", "content": content}
            case BlockKind.REASONING:
                content = [{"type": "reasoning_text", "text": block.text}] if whole else []
                return item | {"type": "reasoning", "summary": [], "content": content}
            case BlockKind.CALL:
                arguments = block.text if whole else ""
                return item | {
                    "type": "function_call",
                    "call_id": block.id,
                    "name": block.name,
                    "arguments": arguments,
                }

    def _item_id(self, block: Block) -> str:
        prefix = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}[block.kind]
        return f"{prefix}_{self._answer.request_id}_{block.index}"

    def _part(self, kind: str, block: Block, **fields: object) -> bytes:
        return self._of_item(kind, block, content_index=0, **fields)

    def _of_item(self, kind: str, block: Block, **fields: object) -> bytes:
        return self._event(kind, item_id=self._item_id(block), output_index=block.index, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        self._number += 1
        data = _encode({"type": kind, "sequence_number": self._number} | fields)
        return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(result: FinishedRequest) -> dict[str, Any]:
    usage = usage_fields(result.usage)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
