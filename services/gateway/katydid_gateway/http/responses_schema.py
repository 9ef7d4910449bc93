"""Bodies of OpenAI's Responses API as typed structs. Conversations are not kept here: `store` changes nothing, and what
asks for a kept one is refused."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "FunctionCallItem",
    "FunctionOutputItem",
    "InputItem",
    "MessageItem",
    "NamedFunction",
    "OutputText",
    "ReasoningItem",
    "RefusalText",
    "ResponsesBody",
    "TextFormat",
    "TextParts",
]


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    pass


class InputText(_Body, tag_field="type", tag="input_text"):
    text: str
    prompt_cache_breakpoint: Any = None


class OutputText(_Body, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class PlainText(_Body, tag_field="type", tag="text"):
    text: str


class ReasoningText(_Body, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(_Body, tag_field="type", tag="summary_text"):
    text: str


class RefusalText(_Body, tag_field="type", tag="refusal"):
    refusal: str


TextParts = list[InputText | OutputText | PlainText | RefusalText]


class MessageItem(_Body, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | TextParts
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(_Body, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str
    caller: dict[str, Any] | None = None
    id: str | None = None
    status: str | None = None
    namespace: str | None = None


class FunctionOutputItem(_Body, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | TextParts
    id: str | None = None
    status: str | None = None
    name: str | None = None
    namespace: str | None = None
    caller: dict[str, Any] | None = None


class ReasoningItem(_Body, tag_field="type", tag="reasoning"):
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    id: str | None = None
    encrypted_content: str | None = None
    status: str | None = None


InputItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


class FunctionTool(_Body):
    name: str
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class NamedFunction(_Body):
    name: str
    type: Literal["function"] = "function"


class TextFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(_Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(_Body):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesBody(_Body, kw_only=True):
    """POST /v1/responses."""

    input: str | list[msgspec.Raw]
    model: str = ""
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: str | None = None
    truncation: Literal["disabled"] | None = None
    client_metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    max_tool_calls: int | None = None
    seed: int | None = None
    top_k: int | None = None
    priority: int | None = None
