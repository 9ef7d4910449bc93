"""Bodies of OpenAI's Responses API into the gateway's own requests."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
from katydid_runtime.errors import InvalidRequestError, UnsupportedError

from katydid_gateway.http.conversation_id import conversation_id
from katydid_gateway.http.failures import decode_body
from katydid_gateway.http.responses_schema import (
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    MessageItem,
    NamedFunction,
    ReasoningItem,
    RefusalText,
    ResponsesBody,
    TextParts,
)
from katydid_gateway.requests import (
    Conversation,
    GenerationRequest,
    Message,
    OutputFormat,
    RequestOptions,
    Role,
    SamplingOptions,
    Tool,
    ToolCall,
)

__all__ = ["responses_request"]

_item_decoder: msgspec.json.Decoder[InputItem] = msgspec.json.Decoder(InputItem)
_message_decoder = msgspec.json.Decoder(MessageItem)


class _Typed(msgspec.Struct):
    type: str | None = None


_type_decoder = msgspec.json.Decoder(_Typed)


def responses_request(body: ResponsesBody, request_id: str) -> GenerationRequest:
    """Raises InvalidRequestError; UnsupportedError for what needs conversations kept on the server."""
    for field, value in (
        ("previous_response_id", body.previous_response_id),
        ("conversation", body.conversation),
        ("background", body.background or None),
    ):
        if value is not None:
            raise UnsupportedError(
                f"{field} needs conversations kept on the server; send the whole input",
                field=field,
                value=value,
                allowed="null",
            )
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        raise UnsupportedError(
            "log probabilities are given by chat completions alone",
            field="top_logprobs" if body.top_logprobs else "include",
            value=body.top_logprobs or "message.output_text.logprobs",
            allowed="0" if body.top_logprobs else "other words",
        )
    sampling = SamplingOptions(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        max_tokens=body.max_output_tokens,
        format=_format(body),
    )
    options = RequestOptions(
        priority=body.priority or 0,
        prompt_cache_key=conversation_id(body.prompt_cache_key, body.metadata),
        request_id=request_id,
    )
    conversation = Conversation(
        messages=tuple(_messages(body)),
        tools=tuple(Tool(tool.name, tool.description, tool.parameters) for tool in body.tools or ()),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
    )
    return GenerationRequest(conversation, body.model, sampling, options)


def _messages(body: ResponsesBody) -> list[Message]:
    messages: list[Message] = []
    if body.instructions:
        messages.append(Message(Role.SYSTEM, body.instructions))
    if body.input == []:
        raise InvalidRequestError("input has no items", field="input", allowed="text, or at least one item")
    if isinstance(body.input, str):
        return [*messages, Message(Role.USER, body.input)]
    for place, raw in enumerate(body.input):
        item = _item(raw, f"input[{place}]")
        if isinstance(item, FunctionOutputItem):
            messages.append(Message(Role.TOOL, _text(item.output), tool_call_id=item.call_id))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(Message(Role(item.role), _text(item.content)))
        else:
            # Thoughts, words and calls of one turn are items of their own here and one message to the model.
            said = messages.pop() if messages and messages[-1].role is Role.ASSISTANT else Message(Role.ASSISTANT)
            messages.append(_joined(said, item))
    # Thoughts that the server alone could read leave a turn in which nothing was said.
    return [message for message in messages if message != Message(Role.ASSISTANT)]


def _item(raw: msgspec.Raw, at: str) -> InputItem:
    """An item without a type is a message."""
    text = bytes(raw)
    untyped = decode_body(_type_decoder, text, at).type is None
    return decode_body(_message_decoder, text, at) if untyped else decode_body(_item_decoder, text, at)


def _joined(said: Message, item: MessageItem | FunctionCallItem | ReasoningItem) -> Message:
    if isinstance(item, MessageItem):
        return replace(said, content=(said.content or "") + _text(item.content))
    if isinstance(item, ReasoningItem):
        thought = "".join(part.text for part in item.content or item.summary)
        return replace(said, reasoning=(said.reasoning or "") + thought or None)
    call = ToolCall(len(said.tool_calls), item.call_id, item.name, item.arguments)
    return replace(said, tool_calls=(*said.tool_calls, call))


def _text(content: str | TextParts) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, RefusalText) else part.text for part in content)


def _tool_choice(body: ResponsesBody) -> str:
    if body.tool_choice is None:
        return "auto"
    if isinstance(body.tool_choice, NamedFunction):
        return body.tool_choice.name
    if body.tool_choice == "required" and not body.tools:
        raise InvalidRequestError("tool_choice is set, but there are no tools", field="tool_choice")
    return body.tool_choice


def _format(body: ResponsesBody) -> OutputFormat | None:
    format = body.text.format if body.text is not None else None
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return OutputFormat("json_schema", '{"type": "object"}', field="text.format")
    if format.schema is None:
        raise InvalidRequestError("text.format.schema is missing", field="text.format.schema")
    return OutputFormat("json_schema", json.dumps(format.schema), field="text.format.schema")
