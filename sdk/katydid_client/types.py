"""What callers give and get: plain frozen values, no protobuf.

Token ids are tuples of ints; durations are seconds as floats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias, TypedDict

__all__ = [
    "CachedTokens",
    "ChatArguments",
    "Choice",
    "Completion",
    "Event",
    "FinishReason",
    "Message",
    "MessageLike",
    "Model",
    "RequestArguments",
    "RouteCandidate",
    "RouteExplanation",
    "Timing",
    "TokenLogprob",
    "Tokens",
    "Tool",
    "ToolCall",
    "ToolLike",
    "Usage",
]


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, `arguments` as JSON text; in a stream a part of one, parts of equal `index` belong together."""

    name: str = ""
    arguments: str = ""
    id: str = ""
    index: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. `role` is system, user, assistant or tool."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


MessageLike: TypeAlias = Message | Mapping[str, Any]
"""A Message, or the mapping the OpenAI API takes: `{"role": "user", "content": "Hello"}`."""

ToolLike: TypeAlias = Tool | Mapping[str, Any]
"""A Tool, or the mapping the OpenAI API takes: `{"type": "function", "function": {...}}`."""


class RequestArguments(TypedDict, total=False):
    """Keyword arguments of every request. What is left out takes the model's default."""

    model: str
    """May be left out when the gateway serves one alone."""
    temperature: float
    """0 is greedy; at most 2."""
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    max_tokens: int
    n: int
    logprobs: int
    """Log probability of each token, and of so many likeliest ones beside it."""
    ignore_eos: bool
    include_stop: bool
    json_schema: Mapping[str, Any] | str
    """The answer is JSON of this schema; at most one of json_schema, json_object, regex, grammar, choice,
    structural_tag."""
    json_object: bool
    regex: str
    grammar: str
    choice: Sequence[str]
    structural_tag: Mapping[str, Any] | str
    prompt_logprobs: bool
    """Log probabilities of the prompt's own tokens too, beside `logprobs`; of generate alone."""
    priority: int
    prompt_cache_key: str
    bypass_cache: bool
    allow_sparse_prefill: bool
    request_id: str
    traceparent: str
    """W3C trace context of the caller's span; the gateway's spans hang under it."""


class ChatArguments(RequestArguments, total=False):
    """Keyword arguments of chat."""

    tools: Iterable[ToolLike]
    tool_choice: str
    """auto, none, required, or a function's name."""
    reasoning_effort: str
    """no_think, low or high, for models that reason."""
    parallel_tool_calls: bool
    """False: a forced answer, or one with an output format, calls one tool at most."""
    template_options: Mapping[str, Any]
    """More variables for the chat template."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (natural logarithm) of one token; `text` is not whole characters where the token is not."""

    token_id: int
    text: str
    data: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that needed no computing, by where they were found."""

    device: int = 0
    memory: int = 0
    disk: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; `cached_tokens` of the prompt were found in a cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cached_by_tier: CachedTokens = CachedTokens()


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time went, as the gateway measured it.

    `phases_s` make up `ttft_s`: queue, lookup, fetch, prefill, transport and more, and the unexplained rest. `tpot_s`
    is the mean time per output token after the first. `trace_id` is empty when the request was not sampled.
    """

    ttft_s: float
    tpot_s: float
    phases_s: Mapping[str, float]
    engine: str = ""
    trace_id: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """One step of an answer: what is new since the event before. `usage` and `timing` come with the last one."""

    index: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    request_id: str = ""
    usage: Usage | None = None
    timing: Timing | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer."""

    index: int
    text: str
    finish_reason: FinishReason
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """All answers of a request, by index. `prompt_logprobs` has one entry a prompt token from the second on."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timing: Timing
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.choices[0].text

    def message(self, index: int = 0) -> Message:
        """Answer `index` as the assistant message that continues the conversation."""
        choice = self.choices[index]
        return Message("assistant", choice.text, choice.reasoning, choice.tool_calls)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a text or conversation, and the text after rendering the chat template."""

    ids: tuple[int, ...]
    prompt: str


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked for. `engines` is how many healthy engines serve it."""

    id: str
    max_model_tokens: int
    engines: int


@dataclass(frozen=True, slots=True)
class RouteCandidate:
    """An engine rank, with the terms that add up to its predicted time to first token.

    Where it computes prompts alone, `partner` is the engine that would go on after another `hand_off_s`.
    """

    engine: str
    dp_rank: int
    predicted_ttft_s: float
    queue_s: float
    fetch_s: float
    prefill_s: float
    device_blocks: int
    cached_blocks: int
    home: bool
    excluded: str
    pressure_s: float = 0.0
    partner: str = ""
    hand_off_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RouteExplanation:
    """Where a prompt would go now, best candidate first, and one sentence why."""

    candidates: tuple[RouteCandidate, ...]
    prompt_tokens: int
    blocks: int
    reason: str
