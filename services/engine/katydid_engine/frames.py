"""Gathers what a session's requests produced until it is sent, then seals it as one numbered frame.

A stream that keeps up gets one frame a step; one that falls behind, or is lost for a while, finds steps merged.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Iterable, Sequence

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.duration import to_duration
from katydid_runtime.errors import KatydidError

from katydid_engine.messages import ChoiceEnd, ChoiceTokens, FirstToken, Load
from katydid_engine.plan import Logprobs
from katydid_engine.request import CachedTokens, FinishReason, Interval

__all__ = ["FrameDraft", "rank_load"]

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.GRAMMAR: pb.FINISH_REASON_GRAMMAR,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


class FrameDraft:
    """The frame to come. ``number`` below is always the request's number in the session."""

    def __init__(self) -> None:
        self._requests = array("I")
        self._choices = array("I")
        self._counts = array("I")
        self._tokens = array("I")
        self._frame = pb.SessionResponse()
        self._accounts: list[tuple[pb.TraceSummary, float, Sequence[Interval]]] = []
        self.empty = True

    def add_tokens(self, number: int, row: ChoiceTokens) -> None:
        self.empty = False
        if row.tokens:
            self._requests.append(number)
            self._choices.append(row.choice)
            self._counts.append(len(row.tokens))
            self._tokens.extend(row.tokens)
        for logprobs, prompt in ((row.logprobs, False), (row.prompt_logprobs, True)):
            if logprobs is not None:
                self._frame.logprobs.append(_logprobs(number, row.choice, logprobs, prompt))

    def add_first_token(self, number: int, first: FirstToken, phases: list[pb.TracePhase], received_at: float) -> None:
        self.empty = False
        message = self._frame.first_tokens.add(request=number, cached=_cached(first.cached))
        message.trace.phases.extend(phases)
        self._accounts.append((message.trace, received_at, first.intervals))

    def add_end(
        self,
        number: int,
        end: ChoiceEnd,
        prompt_tokens: int,
        error: KatydidError | None,
        phases: list[pb.TracePhase],
        received_at: float,
    ) -> None:
        self.empty = False
        message = self._frame.finishes.add(
            request=number,
            choice=end.choice,
            reason=_REASONS[end.reason],
            stop_token=end.stop_token,
            prompt_tokens=prompt_tokens,
            output_tokens=end.output_tokens,
            cached=_cached(end.cached),
            draft_tokens=end.drafted,
            accepted_tokens=end.accepted,
            preemptions=end.preemptions,
            error=None if error is None else _error(error),
        )
        if end.last:
            message.trace.phases.extend(phases)
            self._accounts.append((message.trace, received_at, end.intervals))

    def add_unknown(self, number: int) -> None:
        self.empty = False
        self._frame.unknown_requests.append(number)

    def seal(
        self, number: int, loads: Iterable[pb.RankLoad], *, draining: bool, role: pb.Role.ValueType
    ) -> pb.SessionResponse:
        """The finished frame; the draft must not be used again."""
        frame = self._frame
        frame.frame = number
        frame.draining = draining
        frame.role = role
        frame.loads.extend(loads)
        if self._tokens:
            frame.tokens.requests = _packed(self._requests)
            frame.tokens.choices = _packed(self._choices) if any(self._choices) else b""
            frame.tokens.counts = _packed(self._counts)
            frame.tokens.tokens = _packed(self._tokens)
        now = time.monotonic()
        for summary, received_at, intervals in self._accounts:
            summary.residence.CopyFrom(to_duration(now - received_at))
            if intervals:
                summary.handover.CopyFrom(to_duration(now - intervals[-1].end))
        return frame


def rank_load(dp_rank: int, load: Load) -> pb.RankLoad:
    return pb.RankLoad(
        dp_rank=dp_rank,
        running=load.running,
        waiting=load.waiting,
        waiting_uncached_tokens=load.waiting_uncached_tokens,
        free_pages=load.free_pages,
        total_pages=load.total_pages,
        prefill_tokens_per_second=load.prefill_tokens_per_second,
        decode_tokens_per_second=load.decode_tokens_per_second,
    )


def _logprobs(number: int, choice: int, logprobs: Logprobs, prompt: bool) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        request=number,
        choice=choice,
        chosen=_packed(logprobs.chosen),
        top=logprobs.top,
        top_tokens=_packed(logprobs.top_tokens),
        top_logprobs=_packed(logprobs.top_logprobs),
        prompt=prompt,
    )


def _cached(cached: CachedTokens) -> pb.CachedTokens:
    return pb.CachedTokens(device=cached.device, memory=cached.memory, disk=cached.disk, shared=cached.shared)


def _error(error: KatydidError) -> pb.RequestError:
    return pb.RequestError(
        reason=error.reason,
        message=error.message,
        field=error.field or "",
        value=error.value or "",
        allowed=error.allowed or "",
        retryable=error.retryable,
    )


def _packed(column: array[int] | array[float]) -> bytes:
    """Little-endian bytes of a column of 4-byte items."""
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()
