"""Where a span stands in a trace, in the W3C form that crosses HTTP headers, gRPC metadata and Session messages.

https://www.w3.org/TR/trace-context/: `traceparent: 00-<32 hex trace id>-<16 hex span id>-<2 hex flags>`, and an opaque
`tracestate` that is passed on unchanged. What does not parse is treated as absent, as the recommendation demands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

__all__ = ["TraceContext"]

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_TRACESTATE_LIMIT = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span's place: `trace_id` 32 and `span_id` 16 lower-case hex digits."""

    trace_id: str
    span_id: str
    sampled: bool = True
    tracestate: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> Self | None:
        """The context in a traceparent string, or None when it is empty or malformed."""
        match = _TRACEPARENT.fullmatch(traceparent.strip())
        if match is None:
            return None
        trace_id, span_id, flags = match.groups()
        # Only version 00 ends after the flags; all-zero ids are invalid.
        if (traceparent.startswith("00") and match.end(3) != len(match[0])) or not (
            int(trace_id, 16) and int(span_id, 16)
        ):
            return None
        return cls(
            trace_id, span_id, bool(int(flags, 16) & 1), tracestate if len(tracestate) <= _TRACESTATE_LIMIT else ""
        )

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[str | bytes, str | bytes]]) -> Self | None:
        """The context in HTTP headers (ASGI's byte pairs too) or gRPC metadata, or None."""
        found = {"traceparent": "", "tracestate": ""}
        for key, value in headers:
            name = _text(key).lower()
            if name in found:
                found[name] = _text(value)
        return cls.parse(**found)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def headers(self) -> tuple[tuple[str, str], ...]:
        """The pairs to send on, as gRPC metadata or HTTP headers."""
        pairs = (("traceparent", self.traceparent),)
        return (*pairs, ("tracestate", self.tracestate)) if self.tracestate else pairs

    def span(self, span_id: bytes) -> TraceContext:
        """Another span of the same trace, by its 8-byte id: how a `TracePhase` names what to link to."""
        return TraceContext(self.trace_id, span_id.hex(), self.sampled, self.tracestate)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
