"""Finished spans as JSON lines, for a laptop with no trace collector; `katydid trace` reads them.

One object a line: service, name, trace_id, span_id, parent (a span id or null), links [{trace_id, span_id}], start_ns,
end_ns (Unix nanoseconds), attributes, events [{name, time_ns, attributes}], error (text or null). Several processes may
append to one file: a batch is one write to a descriptor opened for appending.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from katydid_runtime.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["TraceFileExporter"]


class TraceFileExporter(SpanExporter):
    """Appends spans of `service` to the file at `path`. Raises SettingsError when it cannot be opened."""

    def __init__(self, service: str, path: str) -> None:
        self._service = service
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SettingsError(
                f"cannot write trace file {path}: {error.strerror}", field="trace_file", value=path
            ) from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(self._line(span), separators=(",", ":")) + "\n" for span in spans).encode()
        try:
            written = os.write(self._descriptor, lines)
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS if written == len(lines) else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        os.close(self._descriptor)

    def _line(self, span: ReadableSpan) -> dict[str, object]:
        failed = span.status.status_code is StatusCode.ERROR
        return {
            "service": self._service,
            "name": span.name,
            "trace_id": f"{span.context.trace_id:032x}",
            "span_id": f"{span.context.span_id:016x}",
            "parent": f"{span.parent.span_id:016x}" if span.parent else None,
            "links": [
                {"trace_id": f"{link.context.trace_id:032x}", "span_id": f"{link.context.span_id:016x}"}
                for link in span.links
            ],
            "start_ns": span.start_time,
            "end_ns": span.end_time,
            "attributes": dict(span.attributes or {}),
            "events": [
                {"name": event.name, "time_ns": event.timestamp, "attributes": dict(event.attributes or {})}
                for event in span.events
            ],
            "error": (span.status.description or "error") if failed else None,
        }
