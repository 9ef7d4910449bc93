"""A request's phases as spans under the gateway's trace, and as the TraceSummary that frames carry."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from katydid.engine.v1 import engine_pb2 as pb
from katydid_runtime.duration import to_duration
from katydid_runtime.telemetry import Telemetry
from katydid_runtime.trace_context import TraceContext

from katydid_engine.request import Interval, fetch_span_id

__all__ = ["CacheSpans", "PhaseSpans"]

# Lookups whose phase has not ended; of those beyond, the attributes are lost.
_LOOKUPS = 4096


@dataclass(frozen=True, slots=True)
class CacheSpans:
    """What the cache service's spans of one lookup hang under: the phases whose spans the engine exports later, or
    ``parent`` itself where it exports none (``lookup_id`` is empty then). ``attributes`` set on it in time are those
    of the lookup's phase."""

    parent: TraceContext | None = None
    lookup_id: bytes = b""
    attributes: dict[str, str | int | float] = field(default_factory=dict)

    def lookup(self) -> TraceContext | None:
        return self._phase(self.lookup_id)

    def fetch(self, block: int) -> TraceContext | None:
        """Of the run of one tier that begins with ``block`` of the lookup's answer."""
        return self._phase(fetch_span_id(self.lookup_id, block))

    def _phase(self, span_id: bytes) -> TraceContext | None:
        return self.parent.span(span_id) if self.parent is not None and span_id else self.parent


class PhaseSpans:
    """Exports intervals measured on the monotonic clock; spans need the wall clock, read once as an offset."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._lookups: OrderedDict[bytes, dict[str, str | int | float]] = OrderedDict()

    def record(
        self, parent: TraceContext | None, intervals: Sequence[Interval], attributes: dict[str, str]
    ) -> list[pb.TracePhase]:
        """One span and one phase an interval, in order; without a sampled parent, phases with durations alone."""
        exported = parent if self._exports(parent) else None
        return [self._phase(exported, interval, attributes) for interval in intervals]

    def of_cache(self, parent: TraceContext | None, lookup_id: bytes) -> CacheSpans:
        """Parents for the cache service's spans of a lookup whose phase will be recorded under ``lookup_id``."""
        if not self._exports(parent):
            return CacheSpans(parent)
        spans = CacheSpans(parent, lookup_id)
        if lookup_id:
            self._lookups[lookup_id] = spans.attributes
            if len(self._lookups) > _LOOKUPS:
                self._lookups.popitem(last=False)
        return spans

    def _exports(self, parent: TraceContext | None) -> bool:
        return parent is not None and parent.sampled and self._telemetry.enabled

    def _phase(self, parent: TraceContext | None, interval: Interval, attributes: dict[str, str]) -> pb.TracePhase:
        phase = pb.TracePhase(name=interval.phase, duration=to_duration(interval.end - interval.start))
        if interval.tier is not None:
            phase.tier = interval.tier
            attributes = attributes | {"katydid.tier": interval.tier}
        if parent is not None:
            own = self._lookups.pop(interval.span_id, {}) if interval.span_id else {}
            context = self._telemetry.record(
                interval.phase,
                parent,
                start_ns=int(interval.start * 1e9) + self._offset_ns,
                end_ns=int(interval.end * 1e9) + self._offset_ns,
                attributes={**attributes, **own},
                span_id=interval.span_id,
            )
            if context is not None:
                phase.span_id = bytes.fromhex(context.span_id)
        return phase
