"""Between sessions and worker groups: gives requests handles, spreads step reports over sessions, ends what is lost.

Lives in the face's event loop and never blocks it. A worker that ends on its own ends the engine: its requests get a
typed error (one that another engine may take over, if nothing of them was delivered yet).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.errors import (
    ConflictError,
    DrainingError,
    EngineLostError,
    KatydidError,
    OverloadedError,
    UnavailableError,
    error_from_details,
)
from katydid_runtime.rpc_errors import internal_error
from katydid_runtime.telemetry import Telemetry
from katydid_runtime.trace_context import TraceContext

from katydid_engine.block_watch import BlockWatch
from katydid_engine.engine_metrics import EngineMetrics
from katydid_engine.frames import FrameDraft, rank_load
from katydid_engine.grammar import Grammar
from katydid_engine.messages import Abort, ChoiceEnd, FirstToken, KvAsk, KvLookup, Load, StepReport, Submit, ToWorker
from katydid_engine.phase_spans import CacheSpans, PhaseSpans
from katydid_engine.request import CachedTokens, FinishReason, Interval, Request
from katydid_engine.session import Session
from katydid_engine.submission import EngineLimits, parse_submission, requested_choices

__all__ = ["Face"]

_LAST_FRAMES_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """An accepted request; ``open`` are its choices that have not ended, ``delivered`` its output tokens by choice.
    Until ``check`` is done its grammar is being checked, and its worker does not know it."""

    session: Session
    number: int
    request_id: str
    parent: TraceContext | None
    prompt_tokens: int
    received_at: float
    dp_rank: int
    open: set[int]
    check: asyncio.Task[None] | None = None
    delivered: Counter[int] = field(default_factory=Counter)


class Face:
    """``send`` passes a message to a rank's worker group; ``ask_cache`` a worker's wish, with its place in the trace,
    to the cache connector; ``check_grammar`` returns a tenant's grammar as it is compiled, and raises
    KatydidError for one that cannot be used."""

    def __init__(
        self,
        limits: EngineLimits,
        *,
        send: Callable[[int, ToWorker], None],
        ask_cache: Callable[[int, KvAsk, CacheSpans], None],
        check_grammar: Callable[[Grammar, bytes], Awaitable[Grammar]],
        blocks: BlockWatch,
        metrics: EngineMetrics,
        telemetry: Telemetry,
        loads: Sequence[Load],
        role: pb.Role.ValueType,
        boot_id: str,
        reattach_window_s: float,
        max_requests: int,
    ) -> None:
        self.limits = limits
        self.role = role
        self.draining = False
        self.failure: KatydidError | None = None
        self._send = send
        self._ask_cache = ask_cache
        self._check_grammar = check_grammar
        self._blocks = blocks
        self._metrics = metrics
        self._spans = PhaseSpans(telemetry)
        self._boot_id = boot_id
        self._window_s = reattach_window_s
        self._max_requests = max_requests
        self._handles = itertools.count(1)
        self._live: dict[int, _Live] = {}
        self._sessions: dict[str, Session] = {}
        self._loads = list(loads)
        for dp_rank, load in enumerate(loads):
            self._show(dp_rank, load)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_requests(self) -> int:
        return len(self._live)

    def open_session(self, opening: pb.SessionOpen) -> tuple[Session, int, pb.SessionOpened]:
        """The session, new or taken up again, the number of the stream, and what to greet it with. One that the gateway
        has given up is dropped first: what nobody waits for would take the places of what it sends now.

        Raises:
            ConflictError: frames that the gateway misses are gone.
        """
        if (given_up := self._sessions.get(opening.abandoned)) is not None:
            self._drop(given_up)
        session = self._sessions.get(opening.session_id)
        if session is None:
            session = Session(opening.client, self._seal)
            self._sessions[session.id] = session
            stream = session.attach(0)
        else:
            stream = session.attach(opening.last_frame)
        extra = {"client": session.client, "session": session.id, "running": len(session.requests)}
        logger.info("session opened" if session.id != opening.session_id else "session taken up", extra=extra)
        opened = pb.SessionOpened(session_id=session.id, running=sorted(session.requests), boot_id=self._boot_id)
        return session, stream, opened

    def close_stream(self, session: Session, stream: int) -> None:
        """A stream has ended: unless another takes the session up within the window, its requests are aborted."""
        if session.detach(stream):
            asyncio.get_running_loop().call_later(self._window_s, self._abandon, session, stream)

    def submit(self, session: Session, message: pb.SubmitRequest) -> None:
        """Starts a request; one that is refused is answered by its Finish. What still comes on a session that was
        dropped is not begun: nobody would hear of it, nor stop it.

        Raises:
            ConflictError: the number is in use.
        """
        if session.id not in self._sessions:
            return
        received_at = time.monotonic()
        if message.request in session.requests:
            raise ConflictError(
                f"request number {message.request} is in use", field="submit.request", value=message.request
            )
        handle = next(self._handles)
        try:
            self._check_open()
            request = parse_submission(message, self.limits, handle, received_at)
        except KatydidError as error:
            self._refuse(session, message, error, received_at)
            return
        except Exception as error:
            # Whatever is wrong with one request, the others of the session go on.
            self._refuse(session, message, internal_error(error, "a submission"), received_at)
            return
        self._live[handle] = live = _Live(
            session,
            message.request,
            message.request_id,
            TraceContext.parse(message.traceparent, message.tracestate),
            len(request.prompt),
            received_at,
            message.dp_rank,
            set(range(request.sampling.n)),
        )
        session.requests[message.request] = handle
        self._idle.clear()
        self._metrics.prompt.observe(len(request.prompt))
        self._metrics.in_flight.set(len(self._live))
        if request.sampling.grammar is None:
            self._send(message.dp_rank, Submit(request))
        else:
            live.check = asyncio.create_task(self._submit_checked(live, request, request.sampling.grammar))

    def abort(self, session: Session, number: int) -> None:
        handle = session.requests.get(number)
        if handle is None:
            session.draft.add_unknown(number)
            session.wake()
        else:
            self._abort(handle, self._live[handle])

    def prefill_speed(self, dp_rank: int) -> float:
        """Tokens of prompt that a rank computes in a second, of late; 0 before it has."""
        return self._loads[dp_rank].prefill_tokens_per_second

    def on_report(self, dp_rank: int, report: StepReport) -> None:
        """Spreads one step of one rank."""
        self._loads[dp_rank] = report.load
        touched: dict[str, Session] = {}
        for row in report.tokens:
            if (live := self._live.get(row.handle)) is not None:
                live.session.draft.add_tokens(live.number, row)
                live.delivered[row.choice] += len(row.tokens)
                touched[live.session.id] = live.session
        for first in report.first_tokens:
            if (live := self._live.get(first.handle)) is not None:
                self._first_token(live, first)
        for end in report.ends:
            if (live := self._live.get(end.handle)) is not None:
                error = error_from_details(end.error, end.message, {}) if end.error else None
                self._end(live, end, error)
                touched[live.session.id] = live.session
        for session in touched.values():
            session.wake()
        if report.blocks:
            self._blocks.apply(dp_rank, report.blocks)
        for ask in report.kv:
            self._ask_cache(dp_rank, ask, self._cache_spans(ask))
        self._count(dp_rank, report)

    def change_role(self, role: pb.Role.ValueType) -> pb.Role.ValueType:
        """Tells every gateway; returns the role before."""
        previous, self.role = self.role, role
        for session in self._sessions.values():
            session.wake(even_empty=True)
        return previous

    def fail(self, error: KatydidError) -> None:
        """A worker is gone: every open request ends now."""
        self.failure = error
        for handle, live in list(self._live.items()):
            reason: KatydidError = (
                EngineLostError(error.message) if live.delivered.total() else UnavailableError(error.message)
            )
            self._end_open(handle, live, FinishReason.ERROR, reason)
        for session in self._sessions.values():
            session.wake(even_empty=True)

    async def drain(self, timeout_s: float | None) -> int:
        """Refuses new requests and waits for those that run, their last frames included; returns how many had to be
        aborted after ``timeout_s``."""
        self.draining = True
        for session in self._sessions.values():
            session.wake(even_empty=True)
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
            aborted = 0
        except TimeoutError:
            aborted = len(self._live)
            for handle, live in list(self._live.items()):
                self._abort(handle, live)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_FRAMES_S):
                await self._idle.wait()
                for session in list(self._sessions.values()):
                    await session.caught_up()
        return aborted

    async def share_loads(self, interval_s: float) -> None:
        """Sends loads to sessions that have nothing else to hear, and drops gateways that acknowledge nothing, until
        cancelled."""
        told: list[Load] = []
        while True:
            await asyncio.sleep(interval_s)
            news = told != self._loads
            told = list(self._loads)
            for session in list(self._sessions.values()):
                if session.overflown:
                    self._drop(session)
                elif news and session.attached:
                    session.wake(even_empty=True)

    def _check_open(self) -> None:
        """Raises when no request can be taken now."""
        if self.failure is not None:
            raise UnavailableError(f"the engine is failing: {self.failure.message}")
        if self.draining:
            raise DrainingError("the engine is draining")
        if len(self._live) >= self._max_requests:
            raise OverloadedError(
                f"the engine holds {len(self._live)} requests", allowed=f"at most {self._max_requests}"
            )

    def _seal(self, draft: FrameDraft, number: int) -> pb.SessionResponse:
        loads = (rank_load(rank, load) for rank, load in enumerate(self._loads))
        return draft.seal(number, loads, draining=self.draining, role=self.role)

    def _refuse(self, session: Session, message: pb.SubmitRequest, error: KatydidError, received_at: float) -> None:
        self._metrics.refused.labels(error.reason).inc()
        choices = requested_choices(message, self.limits)
        for choice in range(choices):
            end = ChoiceEnd(0, choice, FinishReason.ERROR, choice == choices - 1, 0, CachedTokens(), 0)
            session.draft.add_end(message.request, end, len(message.prompt_ids) // 4, error, [], received_at)
        session.wake()

    async def _submit_checked(self, live: _Live, request: Request, grammar: Grammar) -> None:
        started = time.monotonic()
        try:
            checked = await self._check_grammar(grammar, request.tenant)
        except Exception as error:
            # Whatever went wrong, the request ends.
            reason = error if isinstance(error, KatydidError) else internal_error(error, "the check of a grammar")
            if request.handle in self._live:
                self._metrics.refused.labels(reason.reason).inc()
                self._end_open(request.handle, live, FinishReason.ERROR, reason)
        else:
            # A failing engine may have ended it meanwhile.
            if request.handle in self._live:
                sampling = replace(request.sampling, grammar=checked)
                self._send(live.dp_rank, Submit(replace(request, sampling=sampling)))
        finally:
            self._metrics.grammar.observe(time.monotonic() - started)

    def _abort(self, handle: int, live: _Live) -> None:
        if live.check is None or live.check.done():
            self._send(live.dp_rank, Abort(handle))
        else:
            live.check.cancel()
            self._end_open(handle, live, FinishReason.ABORT, None)

    def _first_token(self, live: _Live, first: FirstToken) -> None:
        phases = self._phases(live, first.intervals)
        live.session.draft.add_first_token(live.number, first, phases, live.received_at)
        for tier in ("device", "memory", "disk", "shared"):
            self._metrics.cached.labels(tier).inc(getattr(first.cached, tier))

    def _end(self, live: _Live, end: ChoiceEnd, error: KatydidError | None) -> None:
        phases = self._phases(live, end.intervals)
        live.session.draft.add_end(live.number, end, live.prompt_tokens, error, phases, live.received_at)
        live.open.discard(end.choice)
        self._metrics.finished.labels(end.reason).inc()
        if end.last:
            self._metrics.preemptions.inc(end.preemptions)
            del self._live[end.handle]
            live.session.requests.pop(live.number, None)
            self._metrics.in_flight.set(len(self._live))
            if not self._live:
                self._idle.set()

    def _end_open(self, handle: int, live: _Live, reason: FinishReason, error: KatydidError | None) -> None:
        """Ends a request's open choices without its worker."""
        for choice in sorted(live.open):
            last = len(live.open) == 1
            end = ChoiceEnd(handle, choice, reason, last, live.delivered[choice], CachedTokens(), 0)
            self._end(live, end, error)
        live.session.wake()

    def _phases(self, live: _Live, intervals: Sequence[Interval]) -> list[pb.TracePhase]:
        for interval in intervals:
            self._metrics.phase.labels(interval.phase, interval.tier or "").observe(interval.end - interval.start)
        return self._spans.record(live.parent, intervals, {"katydid.request_id": live.request_id})

    def _cache_spans(self, ask: KvAsk) -> CacheSpans:
        if isinstance(ask, KvLookup) and (live := self._live.get(ask.handle)) is not None:
            return self._spans.of_cache(live.parent, ask.span_id)
        return CacheSpans()

    def _abandon(self, session: Session, stream: int) -> None:
        """The window after the loss of ``stream`` has passed."""
        if not session.attached and session.is_present(stream):
            self._drop(session)

    def _drop(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        session.close()
        for handle in list(session.requests.values()):
            self._abort(handle, self._live[handle])

    def _show(self, dp_rank: int, load: Load) -> None:
        metrics, rank = self._metrics, str(dp_rank)
        metrics.running.labels(rank).set(load.running)
        metrics.waiting.labels(rank).set(load.waiting)
        metrics.free_pages.labels(rank).set(load.free_pages)
        metrics.total_pages.labels(rank).set(load.total_pages)

    def _count(self, dp_rank: int, report: StepReport) -> None:
        metrics, rank = self._metrics, str(dp_rank)
        self._show(dp_rank, report.load)
        if report.computed_tokens:
            metrics.step.labels(rank).observe(report.step_s)
            metrics.computed.labels(rank).inc(report.computed_tokens)
            metrics.drafted.labels(rank).inc(report.drafted)
            metrics.accepted.labels(rank).inc(report.accepted)
            metrics.output.labels(rank).inc(sum(len(row.tokens) for row in report.tokens))
