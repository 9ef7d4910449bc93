"""Decides whether a request can be served, and if not says which field is wrong, what it held and what is allowed.

HTTP and gRPC share these rules; field names are the ones both spell alike. Types were checked by whoever decoded the
message; here are ranges, and what depends on the model and its engines.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from katydid_runtime.errors import InvalidRequestError, PromptTooLongError, UnknownModelError
from katydid_runtime.request_limits import (
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
)

from katydid_gateway.requests import (
    Conversation,
    Message,
    OutputFormat,
    Prompt,
    RequestOptions,
    Role,
    Sampling,
    SamplingOptions,
    TextPrompt,
    TokenPrompt,
    Tool,
)

__all__ = [
    "ModelLimits",
    "check_model",
    "check_options",
    "check_prompt",
    "check_template_options",
    "prompt_too_long",
    "resolve_sampling",
]

MAX_REQUEST_ID = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_TOOLS = 512
# What Anthropic's clients may send; OpenAI's have 64. Servers of tools give theirs long names.
MAX_TOOL_NAME = 128
SEEDS = 2**64

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the engines of a model can do, from Describe."""

    model: str
    max_model_tokens: int
    vocab_size: int
    max_choices: int
    max_logprobs: int
    grammar_kinds: frozenset[str]


def check_model(asked: str, limits: ModelLimits) -> None:
    """Raises UnknownModelError; an empty name means the only model there is."""
    if asked and asked != limits.model:
        raise UnknownModelError(
            f"the model {asked!r} does not exist here", field="model", value=asked, allowed=limits.model
        )


def check_options(options: RequestOptions) -> None:
    """What concerns the request as a whole. Raises InvalidRequestError."""
    if not -MAX_PRIORITY <= options.priority <= MAX_PRIORITY:
        raise _wrong("priority", options.priority, f"an integer in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    if not usable_id(options.request_id):
        raise InvalidRequestError(
            "the request id is not usable",
            field="request_id",
            value=options.request_id,
            allowed=f"at most {MAX_REQUEST_ID} printable ASCII characters",
        )


def usable_id(name: str) -> bool:
    """Whether `name` may be a request's id; such may stand in a header."""
    return len(name) <= MAX_REQUEST_ID and name.isascii() and name.isprintable()


def check_prompt(prompt: Prompt, limits: ModelLimits) -> None:
    """What can be said before tokenising. Raises InvalidRequestError."""
    if isinstance(prompt, TextPrompt):
        if not prompt.text:
            raise InvalidRequestError("the prompt is empty", field="prompt", allowed="at least one token")
    elif isinstance(prompt, TokenPrompt):
        _check_ids(prompt.ids, limits.vocab_size)
    else:
        _check_conversation(prompt, limits)


def check_template_options(options: Mapping[str, object], field: str) -> None:
    """Variables of the template that are not the caller's to set. Raises InvalidRequestError."""
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        if name in options:
            raise InvalidRequestError(
                f"{field} may not set {name}", field=f"{field}.{name}", value=name, allowed="other names"
            )


def prompt_too_long(limit: int, tokens: str) -> PromptTooLongError:
    """What a prompt of so many `tokens` hears from a model of `limit`."""
    return PromptTooLongError(
        # Frameworks know this error, and shorten their prompts, by OpenAI's own words and by Anthropic's.
        f"this model's maximum context length is {limit} tokens; "
        f"the prompt is too long: {tokens} tokens > {limit - 1} maximum",
        field="prompt",
        value=f"{tokens} tokens",
        allowed=f"at most {limit - 1} tokens",
    )


def resolve_sampling(
    asked: SamplingOptions, defaults: SamplingOptions, limits: ModelLimits, prompt_tokens: int
) -> Sampling:
    """Fills in defaults, draws a seed and checks every range for a prompt of so many tokens.

    Raises PromptTooLongError or InvalidRequestError.
    """
    room = limits.max_model_tokens - prompt_tokens
    if prompt_tokens < 1:
        raise InvalidRequestError("the prompt is empty", field="prompt", allowed="at least one token")
    if room < 1:
        raise prompt_too_long(limits.max_model_tokens, f"{prompt_tokens}")
    most = _max_tokens(asked, room, prompt_tokens, limits)
    return Sampling(
        seed=_seed(asked.seed),
        max_tokens=most,
        temperature=_within("temperature", _first(asked.temperature, defaults.temperature, 1.0), 0.0, MAX_TEMPERATURE),
        top_p=_within("top_p", _first(asked.top_p, defaults.top_p, 1.0), 0.0, 1.0, above=True),
        top_k=_top_k(_first(asked.top_k, defaults.top_k, 0), limits.vocab_size),
        min_p=_within("min_p", _first(asked.min_p, defaults.min_p, 0.0), 0.0, 1.0),
        repetition_penalty=_within(
            "repetition_penalty",
            _first(asked.repetition_penalty, defaults.repetition_penalty, 1.0),
            0.0,
            MAX_REPETITION_PENALTY,
            above=True,
        ),
        presence_penalty=_within(
            "presence_penalty", _first(asked.presence_penalty, None, 0.0), -MAX_PENALTY, MAX_PENALTY
        ),
        frequency_penalty=_within(
            "frequency_penalty", _first(asked.frequency_penalty, None, 0.0), -MAX_PENALTY, MAX_PENALTY
        ),
        logit_bias=_logit_bias(asked, limits.vocab_size),
        stop=_stops(asked.stop),
        stop_token_ids=_stop_tokens(asked.stop_token_ids, limits.vocab_size),
        min_tokens=_within("min_tokens", asked.min_tokens or 0, 0, most),
        n=_within("n", _first(asked.n, None, 1), 1, limits.max_choices),
        logprobs=None if asked.logprobs is None else _within("logprobs", asked.logprobs, 0, limits.max_logprobs),
        prompt_logprobs=asked.prompt_logprobs,
        ignore_eos=asked.ignore_eos,
        include_stop=asked.include_stop,
        format=None if asked.format is None else _format(asked.format, limits.grammar_kinds),
    )


def _first(asked: T | None, default: T | None, otherwise: T) -> T:
    return asked if asked is not None else default if default is not None else otherwise


def _within(field: str, value: T, low: T, high: T, *, above: bool = False) -> T:
    # Written so that NaN fails.
    if not (low < value if above else low <= value) or not value <= high:
        bracket = "(" if above else "["
        raise _wrong(field, value, f"a number in {bracket}{low}, {high}]")
    return value


def _wrong(field: str, value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} is {value}; it must be {allowed}", field=field, value=value, allowed=allowed)


def _seed(asked: int | None) -> int:
    if asked is None:
        return secrets.randbits(63)
    if not -(2**63) <= asked < SEEDS:
        raise _wrong("seed", asked, "a 64-bit integer")
    return asked % SEEDS


def _max_tokens(asked: SamplingOptions, room: int, prompt_tokens: int, limits: ModelLimits) -> int:
    if asked.max_tokens is None:
        return room if asked.usual_tokens is None else min(room, asked.usual_tokens)
    if asked.max_tokens < 1:
        raise _wrong("max_tokens", asked.max_tokens, "an integer >= 1")
    if asked.max_tokens > room:
        raise PromptTooLongError(
            f"this model's maximum context length is {limits.max_model_tokens} tokens; "
            f"input length and `max_tokens` exceed context limit: {prompt_tokens} + {asked.max_tokens} > "
            f"{limits.max_model_tokens}, decrease input length or `max_tokens` and try again",
            field="max_tokens",
            value=asked.max_tokens,
            allowed=f"at most {room} with this prompt",
        )
    return asked.max_tokens


def _top_k(value: int, vocab_size: int) -> int:
    # -1 is how several clients write "off".
    return 0 if value == -1 else min(_within("top_k", value, 0, 2**31 - 1), vocab_size)


def _logit_bias(asked: SamplingOptions, vocab_size: int) -> dict[int, float]:
    if len(asked.logit_bias) > MAX_BIASED_TOKENS:
        raise _wrong("logit_bias", f"{len(asked.logit_bias)} entries", f"at most {MAX_BIASED_TOKENS} entries")
    for token, bias in asked.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise _wrong("logit_bias", token, f"token ids in [0, {vocab_size - 1}]")
        _within(f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS)
    return dict(asked.logit_bias)


def _stops(stops: tuple[str, ...]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise _wrong("stop", f"{len(stops)} strings", f"at most {MAX_STOPS} strings")
    for place, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise _wrong(
                f"stop[{place}]", f"{len(stop)} characters long", f"1 to {MAX_STOP_CHARACTERS} characters long"
            )
    return stops


def _stop_tokens(tokens: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    if len(tokens) > MAX_STOP_TOKENS:
        raise _wrong("stop_token_ids", f"{len(tokens)} ids", f"at most {MAX_STOP_TOKENS} ids")
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise _wrong("stop_token_ids", token, f"token ids in [0, {vocab_size - 1}]")
    return tokens


def _format(asked: OutputFormat, kinds: frozenset[str]) -> OutputFormat:
    if asked.kind not in kinds:
        offered = ", ".join(sorted(kinds)) or "none; structured output is off"
        raise InvalidRequestError(
            f"{asked.field}: {asked.kind} is not served by this model's engines",
            field=asked.field,
            value=asked.kind,
            allowed=offered,
        )
    return asked


def _check_ids(ids: bytes, vocab_size: int) -> None:
    if not ids:
        raise InvalidRequestError("the prompt is empty", field="prompt", allowed="at least one token")
    if len(ids) % 4:
        raise _wrong("prompt", f"{len(ids)} bytes", "a multiple of 4 bytes, little-endian uint32 token ids")
    largest = max(array("I", ids))
    if largest >= vocab_size:
        raise _wrong("prompt", f"token id {largest}", f"token ids in [0, {vocab_size - 1}]")


def _check_conversation(conversation: Conversation, limits: ModelLimits) -> None:
    if not conversation.messages:
        raise InvalidRequestError("there is no message", field="messages", allowed="at least one message")
    for place, message in enumerate(conversation.messages):
        _check_message(f"messages[{place}]", message)
    if len(conversation.tools) > MAX_TOOLS:
        raise _wrong("tools", f"{len(conversation.tools)} tools", f"at most {MAX_TOOLS} tools")
    names = [tool.name for tool in conversation.tools]
    for place, tool in enumerate(conversation.tools):
        _check_tool(f"tools[{place}]", tool)
    if len(set(names)) != len(names):
        raise InvalidRequestError("two tools have one name", field="tools")
    _check_choice(conversation, names, limits)


def _check_choice(conversation: Conversation, names: list[str], limits: ModelLimits) -> None:
    choice = conversation.tool_choice
    if choice not in ("auto", "none"):
        if (choice != "required" or not names) and choice not in names:
            allowed = "auto, none, required or the name of one of the tools" if names else "auto or none without tools"
            raise _wrong("tool_choice", choice, allowed)
        if "structural_tag" not in limits.grammar_kinds:
            raise InvalidRequestError(
                "a call of a tool cannot be forced on this model's engines: they enforce no grammar",
                field="tool_choice",
                value=choice,
                allowed="auto, none",
            )


def _check_message(field: str, message: Message) -> None:
    if message.tool_calls and message.role is not Role.ASSISTANT:
        raise InvalidRequestError(
            f"{field} has tool_calls, which only an assistant can make", field=f"{field}.tool_calls", value=message.role
        )
    # A turn may end within its thoughts.
    thought = message.reasoning is not None and message.role is Role.ASSISTANT
    if message.content is None and not message.tool_calls and not thought:
        raise InvalidRequestError(f"{field} has no content", field=f"{field}.content", allowed="text")
    if message.role is Role.TOOL and message.tool_call_id is None:
        raise InvalidRequestError(
            f"{field} answers no call; tool_call_id is missing",
            field=f"{field}.tool_call_id",
            allowed="id of a tool call",
        )


def _check_tool(field: str, tool: Tool) -> None:
    if not 1 <= len(tool.name) <= MAX_TOOL_NAME or not all(c.isalnum() or c in "_-." for c in tool.name):
        allowed = f"1 to {MAX_TOOL_NAME} letters, digits, _, - or ."
        raise _wrong(f"{field}.function.name", repr(tool.name), allowed)
