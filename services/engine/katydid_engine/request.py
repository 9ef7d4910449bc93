"""What the scheduler knows of a request: what was asked for, and for each of its choices how far it has come."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from katydid_runtime.block_hash import BLOCK_TOKENS, ChainKey, split_hashes

from katydid_engine.grammar import Grammar

__all__ = [
    "CachedTokens",
    "FinishReason",
    "Interval",
    "LiveRequest",
    "Phase",
    "PhaseLog",
    "Request",
    "Sampling",
    "Sequence",
    "State",
    "Tier",
    "fetch_span_id",
    "pages_for",
]


_EVER = 1 << 62


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    GRAMMAR = "grammar"
    ABORT = "abort"
    ERROR = "error"


class Tier(StrEnum):
    """Where a prompt block was found outside the engine's own pages."""

    MEMORY = "memory"
    DISK = "disk"
    SHARED = "shared"


class Phase(StrEnum):
    """What a request spends its time on; the values are span names."""

    QUEUE = "engine.queue"
    LOOKUP = "kvcache.lookup"
    FETCH = "kvcache.fetch"
    PREFILL = "engine.prefill"
    DECODE = "engine.decode"


@dataclass(frozen=True, slots=True)
class Interval:
    """One stretch of one phase, on the host's monotonic clock in seconds; ``tier`` for fetches alone. ``span_id`` is
    the 8-byte id of its span where others hang under it, else empty."""

    phase: Phase
    start: float
    end: float
    tier: Tier | None = None
    span_id: bytes = b""


def fetch_span_id(lookup_id: bytes, block: int) -> bytes:
    """Id of the span of a fetch that begins with ``block`` of a lookup's answer: worker and face know it before the
    span exists, so that the cache service's own spans can hang under it. ``lookup_id`` is the lookup's; empty: none."""
    if not lookup_id:
        return b""
    return ((int.from_bytes(lookup_id, "big") + 1 + block) % 2**64).to_bytes(8, "big")


class PhaseLog:
    """Cuts a request's life into intervals without a gap: each begins where the one before ended."""

    def __init__(self, received_at: float) -> None:
        self._phase = Phase.QUEUE
        self._tier: Tier | None = None
        self._span_id = b""
        self._since = received_at
        self._intervals: list[Interval] = []

    def enter(self, phase: Phase, now: float, tier: Tier | None = None, span_id: bytes = b"") -> None:
        if (phase, tier) != (self._phase, self._tier):
            self.close(now)
            self._phase, self._tier, self._span_id = phase, tier, span_id

    def close(self, now: float) -> None:
        """Ends the present interval; the next begins here. What a device did is told with its time, which may be before
        what a host has noted since."""
        now = max(now, self._since)
        self._intervals.append(Interval(self._phase, self._since, now, self._tier, self._span_id))
        self._since = now

    def take(self) -> tuple[Interval, ...]:
        """The intervals closed since the last call."""
        intervals = tuple(self._intervals)
        self._intervals.clear()
        return intervals


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that needed no computing, by where they were found."""

    device: int = 0
    memory: int = 0
    disk: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; ranges are those of ``SamplingParams`` in engine.proto and were checked before.

    ``max_tokens`` and ``min_tokens`` count output tokens computed elsewhere (``Request.generated``) too.
    """

    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 16
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One validated request.

    Attributes:
        handle: unique in this engine process.
        prompt: token ids, at least one.
        generated: output tokens already computed elsewhere; only with ``n == 1``.
        chain: what its block hashes depend on beside the tokens.
        received_at: when the face took it, on the monotonic clock.
        deadline: when it ends with DEADLINE_EXCEEDED, on the same clock; None for never.
        hold_s: how long its blocks should stay in the KV-cache service.
        tenant: opaque 16-byte id, or empty.
        sparse_prefill: whether its prompt may be computed sparsely; ``chain`` is then that of pages made so.
        blocks_within_s: how long blocks that the cache service does not have are waited for: another engine computes
            them.
        fetch_only: nothing is computed; it ends when its blocks are here.
    """

    handle: int
    prompt: array[int]
    chain: ChainKey
    sampling: Sampling = field(default_factory=Sampling)
    generated: array[int] = field(default_factory=lambda: array("I"))
    priority: int = 0
    received_at: float = 0.0
    deadline: float | None = None
    bypass_cache: bool = False
    hold_s: float | None = None
    tenant: bytes = b""
    sparse_prefill: bool = False
    blocks_within_s: float = 0.0
    fetch_only: bool = False


class State(StrEnum):
    """``WAITING`` holds no pages; the next three hold pages for all tokens known so far; ``FINISHED`` holds none."""

    WAITING = "waiting"
    LOOKUP = "lookup"
    FETCHING = "fetching"
    RUNNING = "running"
    FINISHED = "finished"


class LiveRequest:
    """A request from admission to the end of its last choice: what its choices share."""

    def __init__(self, request: Request, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.choices: dict[int, Sequence] = {}
        self.phases = PhaseLog(request.received_at)
        self.cached = CachedTokens()
        self.preemptions = 0
        self.first_token_at: float | None = None
        self.prompt_tokens_reported = 1

    @property
    def has_first_token(self) -> bool:
        return self.first_token_at is not None

    def enter(self, phase: Phase, now: float, tier: Tier | None = None, span_id: bytes = b"") -> None:
        """Changes phase; from the first token on, everything is decoding."""
        if not self.has_first_token:
            self.phases.enter(phase, now, tier, span_id)


class Sequence:
    """One choice of a request on its way: its tokens, its pages, and how many tokens lie computed in them.

    ``num_computed`` counts host-confirmed tokens whose K and V are in ``pages``, ``num_scheduled`` those that steps in
    flight compute too, and ``num_coming`` the tokens that these add at most; ``num_published`` the leading blocks
    that bear their hash; ``stay`` how often it left its pages, so that a step can tell that it did meanwhile;
    ``num_drafted`` and ``num_accepted`` its drafts; ``likely_cached`` the tokens that were cached when it began to
    wait; ``fits_from`` the pool's gains below which its pages cannot be had. In ``order`` fetches alone come behind all
    that compute. A request begins as one sequence and forks when its first tokens are sampled.
    """

    def __init__(self, id: int, live: LiveRequest, choice: int = 0) -> None:
        self.id = id
        self.live = live
        self.request = live.request
        self.choice = choice
        self.order = (live.request.fetch_only, -live.request.priority, live.arrival, choice)
        self.tokens = array("I", live.request.prompt)
        self.tokens.extend(live.request.generated)
        self.state = State.WAITING
        self.pages: list[int] = []
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_coming = 0
        self.num_published = 0
        self.stay = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.pages_sent = 0
        self.bypassed = 0
        self.likely_cached = 0
        self.fits_from = -_EVER
        self._hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        """Output tokens so far, those computed elsewhere included."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_new_output(self) -> int:
        return self.num_output - len(self.request.generated)

    @property
    def num_unscheduled(self) -> int:
        """Known tokens that no step computes yet."""
        return len(self.tokens) - self.num_scheduled

    @property
    def decodes(self) -> bool:
        """Whether all that is left to compute is its newest sampled token, known or coming. One whose place lies in a
        block that may be others', too, is computed like the end of a prompt, which does not write there."""
        if self.num_coming > 0:
            return True
        own = self.num_scheduled >= self.num_published * BLOCK_TOKENS
        return own and self.num_unscheduled == 1 and self.num_new_output > 0

    @property
    def most_reused(self) -> int:
        """Prompt tokens that a cache can save it: all but the last token of its input."""
        return min(self.num_prompt, self.num_tokens - 1)

    def may_go_on(self, max_model_tokens: int) -> bool:
        """Whether it may need another step after those in flight: it does not end with the token that these add at
        least, and its choices do not have to fork first."""
        if not self.num_coming:
            return True
        limit = min(self.request.sampling.max_tokens - self.num_output, max_model_tokens - self.num_tokens)
        return limit > 1 and self.num_slots == 1

    def most_tokens(self, q_len: int, max_model_tokens: int) -> int:
        """Tokens whose K and V it holds at most after another decode of ``q_len`` tokens."""
        limit = min(max_model_tokens, self.num_prompt + self.request.sampling.max_tokens)
        return min(self.num_tokens + self.num_coming + q_len - 1, limit)

    @property
    def num_slots(self) -> int:
        """Places it takes in a batch once its choices have forked."""
        return 1 if self.num_new_output else self.request.sampling.n

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None and self.num_new_output == 0

    @property
    def reads_cache(self) -> bool:
        """Prompt log probabilities need every prompt token computed."""
        return not self.request.bypass_cache and not self.wants_prompt_logprobs

    def hashes(self) -> list[bytes]:
        """Chain hashes of the full blocks among the known tokens; each is computed once."""
        known = len(self._hashes)
        if len(self.tokens) // BLOCK_TOKENS > known:
            packed = self.request.chain.extend(
                self.tokens[known * BLOCK_TOKENS :],
                first_block=known,
                previous=self._hashes[-1] if known else b"",
            )
            self._hashes += split_hashes(packed)
        return self._hashes

    def fork(self, id: int, choice: int) -> Sequence:
        """Another choice that shares everything up to here but the pages."""
        twin = Sequence(id, self.live, choice)
        twin.tokens = self.tokens[:]
        twin._hashes = self._hashes[:]
        return twin

    def finish_reason(
        self, eos_token_ids: frozenset[int], max_model_tokens: int, complete: bool
    ) -> FinishReason | None:
        """Whether the sequence ends with its newest token; ``complete``: its grammar did."""
        sampling, token = self.request.sampling, self.tokens[-1]
        stops = token in sampling.stop_token_ids or (not sampling.ignore_eos and token in eos_token_ids)
        if stops and self.num_output >= sampling.min_tokens:
            return FinishReason.STOP
        if complete:
            return FinishReason.GRAMMAR
        if self.num_output >= sampling.max_tokens or self.num_tokens >= max_model_tokens:
            return FinishReason.LENGTH
        return None
