"""From a SubmitRequest to a domain request: every field is checked here, and nowhere else.

A refusal names the field as the protocol spells it, the value and what is allowed.
"""

from __future__ import annotations

import math
import time
from array import array
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.block_hash import ChainKey, unpack_ids
from katydid_runtime.duration import to_seconds
from katydid_runtime.errors import InvalidRequestError, PromptTooLongError, UnsupportedError
from katydid_runtime.request_limits import (
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_BLOCKS_WITHIN_S,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
)

from katydid_engine.grammar import GrammarKind
from katydid_engine.grammar_submission import parse_grammar
from katydid_engine.request import Request, Sampling

__all__ = ["EngineLimits", "parse_submission", "requested_choices"]

_SALT_BYTES = 64


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What this engine can do; the fields are those of DescribeResponse.

    ``dense_identity`` is that of pages computed densely in an engine with sparse prefill, whose own is ``identity``;
    empty in one without.
    """

    identity: bytes
    vocab_size: int
    max_model_tokens: int
    max_choices: int
    max_logprobs: int
    dp_ranks: int
    grammar_kinds: tuple[GrammarKind, ...] = ()
    dense_identity: bytes = b""


def requested_choices(message: pb.SubmitRequest, limits: EngineLimits) -> int:
    """Choices that a refusal must end: those asked for, or one when the number itself is wrong."""
    n = message.sampling.n
    return n if 1 <= n <= limits.max_choices else 1


def parse_submission(message: pb.SubmitRequest, limits: EngineLimits, handle: int, received_at: float) -> Request:
    """The request that ``message`` asks for.

    Raises:
        InvalidRequestError: a field is out of range.
        PromptTooLongError: prompt and output so far leave no room for a token.
        UnsupportedError: an adapter is asked for, or a grammar of a kind that is not served.
    """
    if message.adapter:
        raise UnsupportedError(
            "this engine has no adapters", field="adapter", value=message.adapter, allowed="the base model"
        )
    prompt = _token_ids("prompt_ids", message.prompt_ids, limits.vocab_size)
    generated = _token_ids("generated_ids", message.generated_ids, limits.vocab_size)
    if not prompt:
        raise InvalidRequestError("prompt_ids is empty", field="prompt_ids", value="", allowed="at least one token")
    if len(prompt) + len(generated) >= limits.max_model_tokens:
        raise PromptTooLongError(
            f"the prompt has {len(prompt) + len(generated)} tokens, which leaves no room for output",
            field="prompt_ids",
            value=len(prompt) + len(generated),
            allowed=f"at most {limits.max_model_tokens - 1} tokens",
        )
    _integer("dp_rank", message.dp_rank, 0, limits.dp_ranks - 1)
    _integer("priority", message.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _integer("tenant", len(message.tenant), 0, 16, what="bytes")
    _integer("cache_salt", len(message.cache_salt), 0, _SALT_BYTES, what="bytes")
    sampling = _sampling(message.sampling, limits, len(generated))
    timeout_s = _duration("timeout", message.timeout) if message.HasField("timeout") else None
    blocks_within_s = _blocks_within(message)
    sparse = message.allow_sparse_prefill and bool(limits.dense_identity)
    identity = limits.identity if sparse or not limits.dense_identity else limits.dense_identity
    return Request(
        handle=handle,
        prompt=prompt,
        generated=generated,
        chain=ChainKey(identity, salt=bytes(message.cache_salt), public_blocks=message.public_blocks),
        sampling=sampling,
        priority=message.priority,
        received_at=received_at,
        deadline=None if timeout_s is None else time.monotonic() + timeout_s,
        bypass_cache=message.bypass_cache,
        hold_s=_duration("hold", message.hold) if message.HasField("hold") else None,
        tenant=bytes(message.tenant),
        sparse_prefill=sparse,
        blocks_within_s=blocks_within_s,
        fetch_only=message.fetch_only,
    )


def _sampling(message: pb.SamplingParams, limits: EngineLimits, num_generated: int) -> Sampling:
    n = _integer("sampling.n", message.n, 1, limits.max_choices)
    if n > 1 and num_generated:
        raise InvalidRequestError(
            "a request that resumes has one choice", field="sampling.n", value=n, allowed="1 with generated_ids"
        )
    max_tokens = _integer("sampling.max_tokens", message.max_tokens, num_generated + 1, None)
    for token in message.logit_bias:
        _integer("sampling.logit_bias", token, 0, limits.vocab_size - 1)
    for token in message.stop_token_ids:
        _integer("sampling.stop_token_ids", token, 0, limits.vocab_size - 1)
    _integer("sampling.logit_bias", len(message.logit_bias), 0, MAX_BIASED_TOKENS, what="entries")
    _integer("sampling.stop_token_ids", len(message.stop_token_ids), 0, MAX_STOP_TOKENS, what="entries")
    return Sampling(
        seed=message.seed,
        temperature=_number("sampling.temperature", message.temperature, 0.0, MAX_TEMPERATURE),
        top_p=_number("sampling.top_p", message.top_p, 0.0, 1.0, above_low=True),
        top_k=message.top_k if message.top_k < limits.vocab_size else 0,
        min_p=_number("sampling.min_p", message.min_p, 0.0, 1.0),
        repetition_penalty=_number(
            "sampling.repetition_penalty", message.repetition_penalty, 0.0, MAX_REPETITION_PENALTY, above_low=True
        ),
        presence_penalty=_number("sampling.presence_penalty", message.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=_number("sampling.frequency_penalty", message.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=tuple(
            (token, _number("sampling.logit_bias", value, -MAX_BIAS, MAX_BIAS))
            for token, value in sorted(message.logit_bias.items())
        ),
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=_integer("sampling.min_tokens", message.min_tokens, 0, max_tokens),
        max_tokens=max_tokens,
        n=n,
        logprobs=_top("sampling.logprobs", message.logprobs, limits) if message.HasField("logprobs") else None,
        prompt_logprobs=_top("sampling.prompt_logprobs", message.prompt_logprobs, limits)
        if message.HasField("prompt_logprobs")
        else None,
        ignore_eos=message.ignore_eos,
        grammar=parse_grammar(message.grammar, limits.grammar_kinds, limits.vocab_size)
        if message.HasField("grammar")
        else None,
    )


def _blocks_within(message: pb.SubmitRequest) -> float:
    """How long blocks of another engine are waited for; 0 where none are."""
    if not message.HasField("blocks_within"):
        if message.fetch_only:
            raise InvalidRequestError(
                "fetch_only needs blocks_within", field="fetch_only", value=True, allowed="false without blocks_within"
            )
        return 0.0
    if message.bypass_cache:
        raise InvalidRequestError(
            "blocks_within asks for blocks of a cache",
            field="bypass_cache",
            value=True,
            allowed="false with blocks_within",
        )
    if message.sampling.HasField("prompt_logprobs"):
        raise InvalidRequestError(
            "prompt_logprobs need every prompt token computed here, blocks_within asks for what is computed elsewhere",
            field="sampling.prompt_logprobs",
            value=message.sampling.prompt_logprobs,
            allowed="unset with blocks_within",
        )
    if message.fetch_only and message.sampling.n > 1:
        raise InvalidRequestError(
            "fetch_only has one choice", field="sampling.n", value=message.sampling.n, allowed="1 with fetch_only"
        )
    return _duration("blocks_within", message.blocks_within, MAX_BLOCKS_WITHIN_S)


def _token_ids(field: str, packed: bytes, vocab_size: int) -> array[int]:
    if len(packed) % 4:
        raise InvalidRequestError(
            f"{field} has {len(packed)} bytes", field=field, value=len(packed), allowed="4 bytes a token"
        )
    ids = unpack_ids(packed)
    if ids and (largest := max(ids)) >= vocab_size:
        raise InvalidRequestError(
            f"{field} holds the id {largest}", field=field, value=largest, allowed=f"ids below {vocab_size}"
        )
    return ids


def _integer(field: str, value: int, low: int, high: int | None, *, what: str = "") -> int:
    if value < low or (high is not None and value > high):
        allowed = f"{low} to {high}" if high is not None else f"at least {low}"
        found = f"{value} {what}".strip()
        raise InvalidRequestError(f"{field} is {found}", field=field, value=found, allowed=f"{allowed} {what}".strip())
    return value


def _number(field: str, value: float, low: float, high: float, *, above_low: bool = False) -> float:
    """A float32 of the wire; bounds are inclusive but for ``above_low``."""
    if not math.isfinite(value) or value < low or value > high or (above_low and value == low):
        allowed = f"above {low:g}, at most {high:g}" if above_low else f"{low:g} to {high:g}"
        raise InvalidRequestError(f"{field} is {value:g}", field=field, value=f"{value:g}", allowed=allowed)
    return value


def _top(field: str, value: int, limits: EngineLimits) -> int:
    return _integer(field, value, 0, min(limits.max_logprobs, limits.vocab_size))


def _duration(field: str, value: Duration, high: float = math.inf) -> float:
    seconds = to_seconds(value)
    if not 0 < seconds <= high:
        allowed = "more than 0 s" if high == math.inf else f"more than 0 s, at most {high:g} s"
        raise InvalidRequestError(f"{field} is {seconds:g} s", field=field, value=f"{seconds:g}", allowed=allowed)
    return seconds
