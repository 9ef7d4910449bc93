"""The words of the gateway's own language: what was asked for, and what comes back, whatever protocol carries it.

HTTP and gRPC translate into these and out of these; everything between (validation, text, routing, engines) knows
nothing of either.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from katydid_runtime.trace_context import TraceContext

__all__ = [
    "CachedTokens",
    "Caller",
    "Conversation",
    "Delta",
    "FinishReason",
    "FinishedRequest",
    "GenerationRequest",
    "Message",
    "OutputFormat",
    "Prompt",
    "RequestOptions",
    "Role",
    "Sampling",
    "SamplingOptions",
    "TextPrompt",
    "Timing",
    "TokenLogprob",
    "TokenPrompt",
    "Tool",
    "ToolCall",
    "Usage",
]


class Role(StrEnum):
    """Who speaks in a conversation."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class FinishReason(StrEnum):
    """Why an answer ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, or in a stream a part of one: `id` and `name` come with the first part, `arguments` is JSON text."""

    index: int = 0
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; `parameters` is a JSON schema, or None for a function without arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; `content` is None where an assistant only called tools."""

    role: Role
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to continue; `special_tokens` adds the tokenizer's own (BOS) in front."""

    text: str
    special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids to continue, packed little-endian uint32."""

    ids: bytes


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages to answer. `tool_choice` is "auto", "none", "required" or a function's name; `parallel_tool_calls` false
    lets a forced answer, or one with a response format, call once. With `continues` the answer goes on with the last
    message, an assistant's."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    continues: bool = False
    template_options: Mapping[str, object] = field(default_factory=dict)


Prompt: TypeAlias = TextPrompt | TokenPrompt | Conversation


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A constraint the engine enforces: `kind` is json_schema, regex, ebnf, choice or structural_tag, with its source
    or its choices.

    It begins after the packed ids `begin_after`, or at once. `field` is where its caller wrote it, for errors.
    """

    kind: str
    source: str = ""
    choices: tuple[str, ...] = ()
    begin_after: bytes = b""
    field: str = "response_format"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How to sample, as asked: None means the model's default, then the gateway's.

    Without `max_tokens` there are at most `usual_tokens`, and without these as many as the context has room for.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int | None = None
    max_tokens: int | None = None
    usual_tokens: int | None = None
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False
    include_stop: bool = False
    format: OutputFormat | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample, decided: every value in range, `seed` drawn, `max_tokens` within the context."""

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False
    include_stop: bool = False
    format: OutputFormat | None = None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What concerns the request as a whole rather than its tokens."""

    priority: int = 0
    prompt_cache_key: str = ""
    bypass_cache: bool = False
    allow_sparse_prefill: bool = False
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue; `model` empty means the only one there is."""

    prompt: Prompt
    model: str = ""
    sampling: SamplingOptions = SamplingOptions()
    options: RequestOptions = RequestOptions()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and since when: `received_ns` is `time.time_ns()` when the request's first byte was read, for whoever
    reads it later; `began_ns` is `time.monotonic_ns()` then, from which everything is counted: wall clocks are set.

    `timeout_s` is what the caller's own deadline leaves, None without one; `tenant` is "" without API keys; `session`,
    of the header x-session-id, groups requests whose body names no conversation.
    """

    received_ns: int
    tenant: str = ""
    trace: TraceContext | None = None
    timeout_s: float | None = None
    session: str = ""
    began_ns: int = field(default_factory=time.monotonic_ns)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (natural) of one token, its text and bytes, and the likeliest tokens at its place."""

    token_id: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class Delta:
    """New output of one choice; `ids` are packed little-endian uint32. `stop_string` is what ended it, if one did."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    ids: bytes = b""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_string: str | None = None

    @property
    def empty(self) -> bool:
        return not (self.text or self.reasoning or self.tool_calls or self.logprobs or self.ids or self.finish)


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that needed no computing, by where they were found."""

    device: int = 0
    memory: int = 0
    disk: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        return self.device + self.memory + self.disk + self.shared

    def __add__(self, other: CachedTokens) -> CachedTokens:
        return CachedTokens(
            self.device + other.device, self.memory + other.memory, self.disk + other.disk, self.shared + other.shared
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; `completion_tokens` counts delivered ones over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached: CachedTokens = CachedTokens()
    reasoning_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were in no cache, and the output."""
        return max(0, self.prompt_tokens - self.cached.total) + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached + other.cached,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time went: `ttft_s` from receipt, `tpot_s` the mean after it; `phases_s` sum up to the TTFT."""

    ttft_s: float
    tpot_s: float
    phases_s: Mapping[str, float]
    engine: str
    trace_id: str


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The last event of a request."""

    usage: Usage
    timing: Timing
