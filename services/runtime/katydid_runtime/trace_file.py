"""Finished spans as JSON lines, for a laptop with no trace collector; `katydid trace` reads them.

One object a line: service, name, trace_id, span_id, parent (a span id or null), links [{trace_id, span_id}], start_ns,
end_ns (Unix nanoseconds), attributes, events [{name, time_ns, attributes}], error (text or null). Several processes may
append to one file: a batch is one write to a descriptor opened for appending.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from katydid_runtime.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["TraceFileExporter"]

logger = logging.getLogger(__name__)


class TraceFileExporter(SpanExporter):
    """Appends spans of `service` to the file at `path`. Raises SettingsError when it cannot be opened.

    What cannot be written later, on a full disk, is lost; a warning says so once, until writing works again.
    """

    def __init__(self, service: str, path: str) -> None:
        self._service = service
        self._path = path
        self._losing = False
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SettingsError(
                f"cannot write trace file {path}: {error.strerror}", field="trace_file", value=path
            ) from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(self._line(span), separators=(",", ":")) + "\n" for span in spans).encode()
        if self._losing:
            # The last line may have been cut short.
            lines = b"\n" + lines
        problem = "part of it was not taken"
        try:
            written = os.write(self._descriptor, lines)
        except OSError as error:
            written, problem = 0, error.strerror or str(error)
        lost = written < len(lines)
        if lost and not self._losing:
            logger.warning("spans are lost: cannot write trace file %s: %s", self._path, problem)
        self._losing = lost
        return SpanExportResult.FAILURE if lost else SpanExportResult.SUCCESS

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
