"""Sends a request to the engine that routing chooses, and keeps the router's books about it."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from katydid_runtime.block_hash import BLOCK_TOKENS
from katydid_runtime.errors import (
    DrainingError,
    EngineLostError,
    InternalError,
    KatydidError,
    OverloadedError,
    UnavailableError,
)
from katydid_runtime.telemetry import Span

from katydid_gateway.engines.engine_session import EngineListener, EngineSession
from katydid_gateway.engines.fleet import Fleet
from katydid_gateway.engines.frames import EngineTrace, RequestStep
from katydid_gateway.engines.progress import GRAMMAR_S
from katydid_gateway.engines.submission import Submission
from katydid_gateway.flow.fair_queue import PriorityClass, class_of
from katydid_gateway.flow.retries import RetryBudget
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.requests import CachedTokens
from katydid_gateway.routing.breaker import FAILURES
from katydid_gateway.routing.drift import CacheDrift
from katydid_gateway.routing.pairs import last_blocks_s, worth_following
from katydid_gateway.routing.router import Candidate, Decision, RoutedPrompt
from katydid_gateway.routing.tier_index import CacheTier

__all__ = ["Dispatch", "Dispatcher", "Follower"]

_TIERS = {"memory": CacheTier.MEMORY, "disk": CacheTier.DISK, "shared": CacheTier.SHARED}

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Dispatch:
    """A request on its way: where it went and how to call it back."""

    session: EngineSession
    number: int
    candidate: Candidate
    book: int

    @property
    def engine(self) -> str:
        return self.candidate.holder.engine

    def abort(self) -> None:
        self.session.abort(self.number)


class Follower:
    """A fetch on the engine that will go on with a prompt: the fetch ends when that engine has all, or is told to."""

    def __init__(self, session: EngineSession, submission: Submission, rank: int, timeout_s: float) -> None:
        self._session = session
        self._number = session.submit(submission, self, rank, timeout_s, None)

    def abort(self) -> None:
        self._session.abort(self._number)

    def on_step(self, step: RequestStep, arrived_ns: int) -> bool:  # noqa: ARG002
        """See EngineListener: whatever became of it, the request itself is none the worse."""
        return bool(step.finishes)

    def on_lost(self, error: KatydidError) -> None:
        """See EngineListener."""


class Dispatcher:
    """Routes, submits, and settles with the router when the first token or the end comes."""

    def __init__(self, fleet: Fleet, metrics: GatewayMetrics) -> None:
        self._fleet = fleet
        self._router = fleet.router
        self._metrics = metrics
        self._books = itertools.count()
        self._cache_drift = CacheDrift()
        self._retries = RetryBudget()

    def decide(
        self, prompt: RoutedPrompt, span: Span, without: Collection[str] = (), *, after: str | None = None
    ) -> Candidate:
        """The best rank; its terms go into `span`. Raises UnavailableError when there is none.

        Engines in `without` failed this request before: they get it again only where no other can take it. For `after`
        see Router.decide.
        """
        now = time.monotonic()
        decision = self._router.decide(prompt, now, without, after=after)
        if decision.chosen is None and without:
            decision = self._router.decide(prompt, now, after=after)
        if decision.chosen is None:
            raise UnavailableError(_why_none(decision), retry_after_s=1.0)
        if span.recording:
            span.set_all(_attributes(decision, decision.chosen))
        return decision.chosen

    def send(
        self,
        prompt: RoutedPrompt,
        submission: Submission,
        candidate: Candidate,
        listener: EngineListener,
        timeout_s: float,
    ) -> Dispatch:
        """Submit to `candidate`. Raises UnavailableError when it is gone by now."""
        session = self._fleet.session(candidate.holder.engine)
        expected_s = candidate.prediction.expected_s
        number = session.submit(submission, listener, candidate.holder.rank, timeout_s, expected_s)
        book = next(self._books)
        self._router.sent(book, candidate, prompt, time.monotonic(), _owed_s(submission, expected_s))
        self._router.holds(book, candidate.holder)
        self._metrics.routed.labels(candidate.holder.engine).inc()
        self._metrics.index_bytes.set(self._router.size_bytes)
        return Dispatch(session, number, candidate, book)

    def follow(
        self, prompt: RoutedPrompt, submission: Submission, candidate: Candidate, timeout_s: float
    ) -> Follower | None:
        """Lets the candidate's partner fetch the prompt while it is computed; None where that gains nothing."""
        partner = candidate.partner
        if partner is None or submission.options.bypass_cache:
            return None
        giver, taker = (self._router.engines[name] for name in (candidate.holder.engine, partner.engine))
        if not worth_following(giver, taker, len(prompt.chain), candidate.partner_blocks):
            return None
        try:
            session = self._fleet.session(partner.engine)
            return Follower(session, submission.blocks_only(timeout_s), partner.rank, timeout_s)
        except UnavailableError:
            return None

    def last_blocks_s(self, prompt: RoutedPrompt, candidate: Candidate, giver: str) -> float:
        """How long an engine that goes on with what `giver` has computed waits for the last of its blocks."""
        holder, known = candidate.holder, self._router.engines.get(giver)
        if known is None:
            return 0.0
        rank = self._router.engines[holder.engine].ranks[holder.rank]
        return last_blocks_s(known, rank, prompt.tokens, candidate.prediction.device_blocks)

    def first_token(self, dispatch: Dispatch, cached: CachedTokens, trace: EngineTrace) -> None:
        """The engine said what it found in caches: learn from it."""
        self._router.settled(dispatch.book, dispatch.candidate.holder)
        self._router.engines[dispatch.engine].breaker.answered()
        self._compare(dispatch, cached)
        block_bytes = self._router.engines[dispatch.engine].block_bytes
        # Blocks of two tiers may alternate: a tier's tokens took all the phases of that tier together.
        fetch_s = dict.fromkeys(_TIERS, 0.0)
        for phase in trace.phases:
            if phase.name == "kvcache.fetch" and phase.tier in fetch_s:
                fetch_s[phase.tier] += phase.duration_s
        for name, tier in _TIERS.items():
            self._router.speeds.measured(tier, getattr(cached, name) // BLOCK_TOKENS * block_bytes, fetch_s[name])

    def _compare(self, dispatch: Dispatch, cached: CachedTokens) -> None:
        prediction = dispatch.candidate.prediction
        expected = (prediction.device_blocks + prediction.cached_blocks) * BLOCK_TOKENS
        self._metrics.drift.observe(abs(expected - cached.total))
        turned = self._cache_drift.found(dispatch.engine, expected, cached.total)
        share = self._cache_drift.share(dispatch.engine)
        self._metrics.predictions_found.labels(dispatch.engine).set(share)
        if turned:
            logger.error(
                "engine finds little of what routing expects in its caches",
                extra={"engine": dispatch.engine, "found_share": round(share, 3)},
            )

    def failed(self, dispatch: Dispatch, error: KatydidError, *, retryable: bool) -> None:
        """The engine gave the request up."""
        self._metrics.failed.labels(dispatch.engine).inc()
        if (retryable or isinstance(error, InternalError)) and not isinstance(error, OverloadedError | DrainingError):
            engine = self._router.engines[dispatch.engine]
            engine.breaker.failed(time.monotonic())
            if engine.breaker.failures == FAILURES:
                logger.error("engine fails its requests", extra={"engine": dispatch.engine, "error": str(error)})

    def came(self) -> None:
        """A request is about to be sent for the first time."""
        self._retries.came()

    def may_retry(self, error: KatydidError) -> bool:
        """Whether a request that failed so before its first token may go to another engine.

        What was sent to an engine that had just begun to drain goes on for nothing: it has done no work, and says so to
        everybody at once.
        """
        return isinstance(error, EngineLostError | DrainingError) or self._retries.take()

    def resumed(self, engine: str, choices: int) -> None:
        """So many choices that `engine` had begun go on elsewhere."""
        self._metrics.resumed.labels(engine).inc(choices)

    def handed_off(self, engine: str) -> None:
        """A choice that `engine` computed the prompt of goes on elsewhere."""
        self._metrics.handed_off.labels(engine).inc()

    def ended(self, dispatch: Dispatch) -> None:
        """The engine has no more to do for the request."""
        self._router.ended(dispatch.book, dispatch.candidate.holder)


def _owed_s(submission: Submission, expected_s: float) -> float | None:
    """When an engine owes the first token, None for never: whoever lets others go first may wait for any time."""
    if class_of(submission.options.priority) > PriorityClass.NORMAL:
        return None
    grammar_s = GRAMMAR_S if submission.sampling.format is not None else 0.0
    return expected_s + grammar_s + submission.blocks_within_s


def _why_none(decision: Decision) -> str:
    reasons = {candidate.excluded for candidate in decision.candidates if candidate.excluded}
    return f"no engine can take the request ({'; '.join(sorted(reasons)) or 'none is connected'})"


def _attributes(decision: Decision, chosen: Candidate) -> dict[str, str | bool | int | float]:
    prediction = chosen.prediction
    return {
        "route.engine": chosen.holder.engine,
        "route.dp_rank": chosen.holder.rank,
        "route.reason": decision.reason,
        "route.partner": chosen.partner.engine if chosen.partner is not None else "",
        "route.candidates": len(decision.candidates),
        "route.predicted_ttft_ms": round(prediction.ttft_s * 1e3, 3),
        "route.predicted_queue_ms": round(prediction.queue_s * 1e3, 3),
        "route.predicted_fetch_ms": round(prediction.fetch_s * 1e3, 3),
        "route.predicted_prefill_ms": round(prediction.prefill_s * 1e3, 3),
        "route.device_blocks": prediction.device_blocks,
        "route.cached_blocks": prediction.cached_blocks,
    }
