"""Where a request's time goes: marks taken along its way, and the spans and phases they become.

Durations of the engine come from its own clock inside TraceSummary, so no clocks of two hosts are compared. The time to
first token is the sum of
    receive    reading and checking the request
    tokenise   template and tokenizer
    prepare    sampling resolved, the message and the answer's text machinery built
    route      hashing and choosing
    admission  waiting at the gate for an engine with room
    retry      attempts on engines that failed
    transport  round trip to the engine less the time the engine had the request
    queue, lookup, fetch, prefill   the engine's phases
    handover   from the computed token to its frame: between the engine's processes
    deliver    from the first frame's arrival to handing its text to the client's writer
    rest       what none of them explains
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from katydid_runtime.telemetry import Span, Telemetry
from katydid_runtime.trace_context import TraceContext

from katydid_gateway.engines.frames import EnginePhase, EngineTrace
from katydid_gateway.requests import Timing

__all__ = ["RequestClock"]

_PHASES = {
    "engine.queue": "queue",
    "kvcache.lookup": "lookup",
    "kvcache.fetch": "fetch",
    "engine.prefill": "prefill",
}
_TTFT_LINKS = ("engine.prefill", "kvcache.fetch")
_TPOT_LINKS = ("engine.decode",)


class _Phase:
    # A class of its own: three a request, and a generator's context takes four times as long.
    __slots__ = ("_began", "_clock", "_name")

    def __init__(self, clock: RequestClock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        self._began = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        self._clock.add(self._name, time.monotonic_ns() - self._began)


@dataclass(slots=True)
class RequestClock:
    """Marks of one request, all of them monotonic; `received_ns` is Unix time when `began_ns` was taken, and makes Unix
    times of the others for spans."""

    telemetry: Telemetry
    span: Span
    received_ns: int
    began_ns: int
    phases_s: dict[str, float] = field(default_factory=dict)
    engine: str = ""
    _submitted_ns: int = 0
    _arrived_ns: int = 0
    _first_ns: int = 0
    _last_ns: int = 0
    _trace: EngineTrace = field(default_factory=EngineTrace)

    def phase(self, name: str) -> _Phase:
        """Adds the block's duration to phase `name`."""
        return _Phase(self, name)

    def add(self, name: str, duration_ns: int) -> None:
        self.phases_s[name] = self.phases_s.get(name, 0.0) + duration_ns / 1e9

    def received(self) -> None:
        """The request has been read and checked; the pipeline begins."""
        self.add("receive", time.monotonic_ns() - self.began_ns)

    def submitted(self, engine: str) -> None:
        """It went to an engine."""
        self.engine = engine
        self._submitted_ns = time.monotonic_ns()

    def moved(self, engine: str) -> None:
        """After its first token it went on to another engine: no part of the time to first token."""
        self.engine = engine

    def lost(self) -> None:
        """That engine failed before it answered."""
        self.add("retry", time.monotonic_ns() - self._submitted_ns)

    def first_frame(self, arrived_ns: int, trace: EngineTrace) -> None:
        """The first token came, with what the engine spent its time on."""
        self._arrived_ns, self._trace = arrived_ns, trace
        round_trip_s = (arrived_ns - self._submitted_ns) / 1e9
        explained_s = 0.0
        for phase in trace.phases:
            if name := _PHASES.get(phase.name):
                self.phases_s[name] = self.phases_s.get(name, 0.0) + phase.duration_s
                explained_s += phase.duration_s
        self.add("handover", int(trace.handover_s * 1e9))
        explained_s += trace.handover_s
        self.phases_s["transport"] = max(0.0, round_trip_s - (trace.residence_s or explained_s))

    def delivered(self) -> bool:
        """Output is handed to the client's writer now; True the first time."""
        self._last_ns = time.monotonic_ns()
        if self._first_ns or not self._arrived_ns:
            return False
        self._first_ns = self._last_ns
        self.add("deliver", self._first_ns - self._arrived_ns)
        self.phases_s["rest"] = self.ttft_s - sum(self.phases_s.values())
        return True

    @property
    def ttft_s(self) -> float:
        """0 before the first output."""
        return (self._first_ns - self.began_ns) / 1e9 if self._first_ns else 0.0

    def tpot_s(self, tokens: int) -> float:
        """Mean over the tokens of one choice after its first; 0 with fewer than two."""
        return (self._last_ns - self._first_ns) / 1e9 / (tokens - 1) if tokens > 1 else 0.0

    @property
    def decode_s(self) -> float:
        """From the first output to the last."""
        return (self._last_ns - self._first_ns) / 1e9 if self._first_ns else 0.0

    @property
    def fetches_s(self) -> list[tuple[str, float]]:
        """(tier, seconds) of the fetches that the first token waited for."""
        return [(phase.tier, phase.duration_s) for phase in self._trace.phases if phase.name == "kvcache.fetch"]

    def timing(self, tokens: int) -> Timing:
        """The answer's own account; `tokens` are those of its longest choice."""
        return Timing(
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s(tokens),
            phases_s=dict(self.phases_s),
            engine=self.engine,
            trace_id=self.trace_id,
        )

    @property
    def trace_id(self) -> str:
        """Of a trace that is recorded, else ""."""
        context = self.span.context
        return context.trace_id if context is not None and self.span.recording else ""

    def export(self, tokens: int, trace: EngineTrace) -> None:
        """Export the `ttft` and `tpot` spans under the request's, linked to the engine's spans they waited for."""
        if not self._first_ns or not self.span.recording:
            return
        milliseconds = {f"ttft.{name}_ms": round(value * 1e3, 3) for name, value in self.phases_s.items()}
        offset_ns = self.received_ns - self.began_ns
        first_ns = self._first_ns + offset_ns
        self.telemetry.record(
            "ttft",
            self.span.context,
            start_ns=self.received_ns,
            end_ns=first_ns,
            links=self._links(self._trace.phases, _TTFT_LINKS),
            attributes={"ttft_ms": round(self.ttft_s * 1e3, 3), **milliseconds},
        )
        if tokens > 1:
            self.telemetry.record(
                "tpot",
                self.span.context,
                start_ns=first_ns,
                end_ns=self._last_ns + offset_ns,
                links=self._links(trace.phases, _TPOT_LINKS),
                attributes={"tpot_ms": round(self.tpot_s(tokens) * 1e3, 3), "tokens": tokens},
            )

    def _links(self, phases: tuple[EnginePhase, ...], names: tuple[str, ...]) -> list[TraceContext]:
        context = self.span.context
        if context is None:
            return []
        return [context.span(phase.span_id) for phase in phases if phase.name in names and len(phase.span_id) == 8]
