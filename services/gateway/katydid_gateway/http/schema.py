"""Bodies of the OpenAI API as typed structs: decoding checks every type, and refuses every field that is not listed.

Fields that OpenAI clients send and that do not change an answer here (user, metadata, store, ...) are accepted.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from katydid_gateway.http.output_formats import ResponseFormatBody, StructuredOutputs

__all__ = [
    "ChatCompletionBody",
    "CompletionBody",
    "MessageBody",
    "NamedToolChoice",
    "RefusalPart",
    "StreamOptions",
    "ToolBody",
    "ToolCallBody",
]


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    pass


class TextPart(_Body, tag_field="type", tag="text"):
    """Part of a message's content; text is the only kind these models read. Marks for caches change nothing here."""

    text: str
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class RefusalPart(_Body, tag_field="type", tag="refusal"):
    """What an assistant said when it would not answer."""

    refusal: str


class FunctionCall(_Body):
    name: str
    arguments: str = ""


class ToolCallBody(_Body):
    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class MessageBody(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    # LiteLLM keeps here what it does not know of an answer, and sends it back.
    provider_specific_fields: Any = None
    cache_control: Any = None


class FunctionBody(_Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(_Body):
    function: FunctionBody
    type: Literal["function"] = "function"
    cache_control: Any = None


class FunctionName(_Body):
    name: str


class NamedToolChoice(_Body):
    function: FunctionName
    type: Literal["function"] = "function"


class StreamOptions(_Body):
    include_usage: bool = False
    # vLLM's: what was used so far, in every event.
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class _Sampled(_Body, kw_only=True):
    """Sampling fields that both endpoints have, the extras of other open servers included."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    response_format: ResponseFormatBody | None = None

    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    allow_sparse_prefill: bool | None = None
    bypass_cache: bool | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None


class ChatCompletionBody(_Sampled, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[MessageBody]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    verbosity: str | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionBody(_Sampled, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
