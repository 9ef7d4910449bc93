"""A decided request as the one message an engine gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.duration import to_duration
from katydid_runtime.request_limits import MAX_BLOCKS_WITHIN_S
from katydid_runtime.trace_context import TraceContext

from katydid_gateway.requests import OutputFormat, RequestOptions, Sampling

__all__ = ["Submission"]

# An engine takes no timeout of 0; the gateway's own timer ends such a request.
_SHORTEST_TIMEOUT_S = 0.001
_SEEDS = 2**64
HOLD_S = 30.0


@dataclass(frozen=True, slots=True)
class Submission:
    """Everything of a request but which engine and rank get it."""

    request_id: str
    prompt_ids: bytes
    sampling: Sampling
    options: RequestOptions
    trace: TraceContext | None
    cache_salt: bytes = b""
    public_blocks: int = 0
    tenant: bytes = b""
    generated_ids: bytes = b""
    hold_s: float = 0.0
    blocks_within_s: float = 0.0
    fetch_only: bool = False

    @property
    def reads_cache(self) -> bool:
        """Log probabilities of a prompt's tokens need all of it computed."""
        return not (self.options.bypass_cache or self.sampling.prompt_logprobs)

    def prompt_only(self) -> Self:
        """The same request up to its first tokens, its blocks kept until another engine has fetched them."""
        sampling = replace(self.sampling, max_tokens=1, min_tokens=min(1, self.sampling.min_tokens))
        return replace(self, sampling=sampling, hold_s=HOLD_S)

    def blocks_only(self, within_s: float) -> Self:
        """The fetch of its prompt's blocks, as another engine computes them; no token comes of it."""
        sampling = Sampling(seed=0, max_tokens=1)
        within_s = min(within_s, MAX_BLOCKS_WITHIN_S)
        return replace(self, sampling=sampling, blocks_within_s=within_s, fetch_only=True)

    def continued(self, choice: int, generated_ids: bytes) -> Self:
        """The same request for one of its choices alone, after what it has said already (packed ids)."""
        sampling = replace(
            self.sampling,
            seed=(self.sampling.seed + choice) % _SEEDS,
            n=1,
            prompt_logprobs=self.sampling.prompt_logprobs and not generated_ids,
        )
        name = self.request_id if self.sampling.n == 1 else f"{self.request_id}.{choice}"
        return replace(self, request_id=name, sampling=sampling, generated_ids=generated_ids)

    def message(self, number: int, dp_rank: int, timeout_s: float) -> pb.SessionRequest:
        """The message, with the time the caller still gives it."""
        whole = pb.SessionRequest()
        message = whole.submit
        # In place: a message that is given to another is copied, and ids are a megabyte.
        message.prompt_ids, message.generated_ids = self.prompt_ids, self.generated_ids
        rest = pb.SubmitRequest(
            request=number,
            request_id=self.request_id,
            sampling=_sampling(self.sampling),
            dp_rank=dp_rank,
            priority=self.options.priority,
            cache_salt=self.cache_salt,
            public_blocks=self.public_blocks,
            allow_sparse_prefill=self.options.allow_sparse_prefill,
            tenant=self.tenant,
            bypass_cache=self.options.bypass_cache,
            fetch_only=self.fetch_only,
        )
        message.MergeFrom(rest)
        message.timeout.CopyFrom(to_duration(max(_SHORTEST_TIMEOUT_S, timeout_s)))
        if self.hold_s:
            message.hold.CopyFrom(to_duration(self.hold_s))
        if self.blocks_within_s:
            message.blocks_within.CopyFrom(to_duration(self.blocks_within_s))
        if self.trace is not None:
            message.traceparent = self.trace.traceparent
            message.tracestate = self.trace.tracestate
        return whole


def _sampling(sampling: Sampling) -> pb.SamplingParams:
    message = pb.SamplingParams(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        stop_token_ids=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        n=sampling.n,
        logprobs=sampling.logprobs,
        prompt_logprobs=(sampling.logprobs or 0) if sampling.prompt_logprobs else None,
        ignore_eos=sampling.ignore_eos,
    )
    if sampling.format is not None:
        message.grammar.CopyFrom(_grammar(sampling.format))
    return message


def _grammar(format: OutputFormat) -> pb.Grammar:
    message = pb.Grammar(begin_after_ids=format.begin_after)
    match format.kind:
        case "choice":
            message.choice.choices.extend(format.choices)
        case "regex":
            message.regex = format.source
        case "ebnf":
            message.ebnf = format.source
        case "structural_tag":
            message.structural_tag = format.source
        case _:
            message.json_schema = format.source
    return message
