"""One frame of a Session, sorted by request: what this step means for each of them."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.block_hash import unpack_ids
from katydid_runtime.duration import to_seconds
from katydid_runtime.errors import KatydidError, error_from_details

from katydid_gateway.requests import CachedTokens, FinishReason

__all__ = ["EnginePhase", "EngineTrace", "Finish", "RequestStep", "Row", "RowLogprobs", "sort_frame"]

_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_GRAMMAR: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORT: FinishReason.ABORT,
}


@dataclass(frozen=True, slots=True)
class EnginePhase:
    """A phase the engine measured: its span's name and 8-byte id (empty when not sampled), and a fetch's tier."""

    name: str
    span_id: bytes
    duration_s: float
    tier: str


@dataclass(frozen=True, slots=True)
class EngineTrace:
    """All phases so far, how long the engine has had the request, and how long after the last phase its frame left;
    0 when it does not say."""

    phases: tuple[EnginePhase, ...] = ()
    residence_s: float = 0.0
    handover_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Columns of one row: chosen[i] for token i, then `top` ids and values a token, token-major."""

    chosen: array[float]
    top: int
    top_ids: array[int]
    top_values: array[float]


@dataclass(slots=True)
class Row:
    """New tokens of one choice; `stop_token` is set when the last of them is the stop token that ended it."""

    choice: int
    ids: array[int]
    logprobs: RowLogprobs | None = None
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice; `error` is set when it failed."""

    choice: int
    reason: FinishReason | None
    error: KatydidError | None
    retryable: bool
    cached: CachedTokens
    trace: EngineTrace


_NOTHING_CACHED = CachedTokens()
_NO_TRACE = EngineTrace()


@dataclass(slots=True)
class RequestStep:
    """What one frame holds for one request; log probabilities of its prompt come in parts, a chunk of it each."""

    rows: list[Row] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    first: bool = False
    cached: CachedTokens = _NOTHING_CACHED
    trace: EngineTrace = _NO_TRACE


def sort_frame(frame: pb.SessionResponse) -> dict[int, RequestStep]:
    """Steps by request number. Raises ValueError when the frame's columns do not fit each other."""
    steps: dict[int, RequestStep] = {}
    rows = _rows(frame, steps)
    for first in frame.first_tokens:
        step = steps.setdefault(first.request, RequestStep())
        step.first, step.cached, step.trace = True, _cached(first.cached), _trace(first.trace)
    for logprobs in frame.logprobs:
        columns = _logprobs(logprobs)
        if logprobs.prompt:
            steps.setdefault(logprobs.request, RequestStep()).prompt_logprobs.append(columns)
        else:
            _attach(columns, rows.get((logprobs.request, logprobs.choice), []))
    for finish in frame.finishes:
        steps.setdefault(finish.request, RequestStep()).finishes.append(_finish(finish))
        ended = rows.get((finish.request, finish.choice))
        if ended and finish.HasField("stop_token") and ended[-1].ids and ended[-1].ids[-1] == finish.stop_token:
            ended[-1].stop_token = finish.stop_token
    return steps


def _rows(frame: pb.SessionResponse, steps: dict[int, RequestStep]) -> dict[tuple[int, int], list[Row]]:
    """Rows by request and choice, where they will be asked for; a frame that merges several steps has several of one
    choice, in order."""
    columns = frame.tokens
    requests, counts, tokens = unpack_ids(columns.requests), unpack_ids(columns.counts), unpack_ids(columns.tokens)
    choices = unpack_ids(columns.choices) if columns.choices else array("I", bytes(4 * len(requests)))
    if not len(requests) == len(counts) == len(choices) or sum(counts) != len(tokens):
        raise ValueError("token columns of different lengths")
    rows: dict[tuple[int, int], list[Row]] = {}
    # Only what else there is in a frame has to find its row.
    wanted = bool(frame.logprobs or frame.finishes)
    start = 0
    for request, choice, count in zip(requests, choices, counts, strict=True):
        row = Row(choice, tokens[start : start + count])
        start += count
        if wanted:
            rows.setdefault((request, choice), []).append(row)
        step = steps.get(request)
        if step is None:
            steps[request] = RequestStep([row])
        else:
            step.rows.append(row)
    return rows


def _attach(columns: RowLogprobs, rows: list[Row]) -> None:
    """Log probabilities come in the order of the rows they belong to."""
    row = next((row for row in rows if row.logprobs is None), None)
    if row is None or len(columns.chosen) != len(row.ids):
        raise ValueError("log probabilities that belong to no row of tokens")
    row.logprobs = columns


def _logprobs(message: pb.TokenLogprobs) -> RowLogprobs:
    top_ids, top_values = unpack_ids(message.top_tokens), _floats(message.top_logprobs)
    chosen = _floats(message.chosen)
    if not len(top_ids) == len(top_values) == len(chosen) * message.top:
        raise ValueError("log probability columns of different lengths")
    return RowLogprobs(chosen, message.top, top_ids, top_values)


def _floats(packed: bytes) -> array[float]:
    values = array("f")
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _finish(message: pb.Finish) -> Finish:
    error: KatydidError | None = None
    if message.reason == pb.FINISH_REASON_ERROR:
        details = {"field": message.error.field, "value": message.error.value, "allowed": message.error.allowed}
        given = {key: value for key, value in details.items() if value}
        error = error_from_details(message.error.reason, message.error.message, given)
    return Finish(
        choice=message.choice,
        reason=_REASONS.get(message.reason),
        error=error,
        retryable=message.error.retryable,
        cached=_cached(message.cached),
        trace=_trace(message.trace),
    )


def _cached(message: pb.CachedTokens) -> CachedTokens:
    return CachedTokens(message.device, message.memory, message.disk, message.shared)


def _trace(message: pb.TraceSummary) -> EngineTrace:
    phases = tuple(EnginePhase(p.name, p.span_id, to_seconds(p.duration), p.tier) for p in message.phases)
    return EngineTrace(phases, to_seconds(message.residence), to_seconds(message.handover))
