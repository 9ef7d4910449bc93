"""A request's phases as spans under the gateway's trace, and as the TraceSummary that frames carry."""

from __future__ import annotations

import time
from collections.abc import Sequence

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.telemetry import Telemetry
from katydid_runtime.trace_context import TraceContext

from katydid_engine.frames import duration
from katydid_engine.request import Interval

__all__ = ["PhaseSpans"]


class PhaseSpans:
    """Exports intervals measured on the monotonic clock; spans need the wall clock, read once as an offset."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def record(
        self, parent: TraceContext | None, intervals: Sequence[Interval], attributes: dict[str, str]
    ) -> list[pb.TracePhase]:
        """One span and one phase an interval, in order; without a sampled parent, phases with durations alone."""
        sampled = parent is not None and parent.sampled and self._telemetry.enabled
        return [self._phase(parent if sampled else None, interval, attributes) for interval in intervals]

    def _phase(self, parent: TraceContext | None, interval: Interval, attributes: dict[str, str]) -> pb.TracePhase:
        phase = pb.TracePhase(name=interval.phase, duration=duration(interval.end - interval.start))
        if interval.tier is not None:
            phase.tier = interval.tier
            attributes = attributes | {"katydid.tier": interval.tier}
        if parent is not None:
            context = self._telemetry.record(
                interval.phase,
                parent,
                start_ns=int(interval.start * 1e9) + self._offset_ns,
                end_ns=int(interval.end * 1e9) + self._offset_ns,
                attributes=attributes,
            )
            if context is not None:
                phase.span_id = bytes.fromhex(context.span_id)
        return phase
