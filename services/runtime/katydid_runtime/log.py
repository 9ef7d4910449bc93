"""Logs: standard `logging`, one JSON object a line on stderr, request and trace id in every line of a request.

`logger.info("model loaded", extra={"model": name, "load_s": 3.2})` becomes
`{"time": "...", "level": "info", "service": "engine", "logger": "...", "message": "model loaded", "model": ...}`.
What users write is never logged: fields named in `WITHHELD` are dropped whatever their value.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

__all__ = ["WITHHELD", "JsonFormatter", "bind", "configure", "request_id", "trace_id"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
trace_id: ContextVar[str] = ContextVar("trace_id", default="")

WITHHELD = frozenset({"prompt", "messages", "text", "content", "token_ids", "ids", "api_key", "authorization"})

# uvicorn repeats every message in colour.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object; see the module's first lines for the fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, variable in (("request_id", request_id), ("trace_id", trace_id)):
            if value := variable.get():
                line[name] = value
        line.update(
            (name, value) for name, value in vars(record).items() if name not in _STANDARD and name not in WITHHELD
        )
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line)


def configure(service: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Send every log record of this process to `stream` (stderr) as JSON lines. Replaces handlers set before."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # No line says these of itself, and finding them out takes as long as writing the line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root.setLevel(level.upper())


@contextmanager
def bind(*, request: str | None = None, trace: str | None = None) -> Iterator[None]:
    """Put the given ids into every line logged inside the block, by this task and the tasks it starts."""
    tokens = [
        (variable, variable.set(value))
        for variable, value in ((request_id, request), (trace_id, trace))
        if value is not None
    ]
    try:
        yield
    finally:
        for variable, token in reversed(tokens):
            variable.reset(token)
