"""Reading trace files and putting the spans of one request together.

A trace is one request's spans from all processes, by trace id. What cannot be read is counted, not hidden: a process
that died in mid-write leaves a torn last line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from katydid_runtime.errors import NotFoundError, SettingsError

__all__ = ["Node", "Span", "choose_trace", "parse_spans", "read_spans", "tree"]


@dataclass(frozen=True, slots=True)
class Span:
    """One line of a trace file. `links` are span ids; times are Unix nanoseconds of the process that wrote it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str | None
    links: tuple[str, ...]
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    error: str | None

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Node:
    """A span with its children, earliest first."""

    span: Span
    children: tuple[Node, ...]


def read_spans(paths: Sequence[Path]) -> tuple[list[Span], int]:
    """The spans of all files, and the number of lines that were none. Raises SettingsError for an unreadable file."""
    spans: list[Span] = []
    broken = 0
    for path in paths:
        try:
            with path.open(encoding="utf-8", errors="replace") as lines:
                found, torn = parse_spans(lines)
        except OSError as error:
            raise SettingsError(f"cannot read trace file {path}: {error.strerror}", value=str(path)) from error
        spans += found
        broken += torn
    return spans, broken


def parse_spans(lines: Iterable[str]) -> tuple[list[Span], int]:
    """The spans of a trace file's lines, and how many lines were none."""
    spans: list[Span] = []
    broken = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            spans.append(_span(json.loads(line)))
        except (ValueError, TypeError, KeyError):
            broken += 1
    return spans, broken


def choose_trace(spans: Iterable[Span], wanted: str | None = None) -> list[Span]:
    """The spans of trace `wanted` (an id, its beginning, or a request id), or of the request that ended last.

    Raises NotFoundError.
    """
    spans = list(spans)
    if wanted is None:
        roots = [span for span in spans if span.name == "gateway.request"] or spans
        if not roots:
            raise NotFoundError("the trace files hold no spans")
        trace_id = max(roots, key=lambda span: span.end_ns).trace_id
    else:
        matches = {
            span.trace_id
            for span in spans
            if span.trace_id.startswith(wanted.lower()) or wanted in _request_ids(span.attributes)
        }
        if len(matches) != 1:
            what = "no trace" if not matches else f"{len(matches)} traces"
            raise NotFoundError(f"{what} with id {wanted}", field="trace_id", value=wanted)
        trace_id = matches.pop()
    return [span for span in spans if span.trace_id == trace_id]


def tree(spans: Iterable[Span]) -> tuple[Node, ...]:
    """The spans below their parents; those whose parent is not among them (a caller's span) are roots."""
    spans = sorted(spans, key=lambda span: (span.start_ns, span.end_ns))
    known = {span.span_id for span in spans}
    children: dict[str | None, list[Span]] = {}
    for span in spans:
        children.setdefault(span.parent if span.parent in known else None, []).append(span)

    def node(span: Span) -> Node:
        return Node(span, tuple(node(child) for child in children.get(span.span_id, ())))

    return tuple(node(span) for span in children.get(None, ()))


def _span(line: Any) -> Span:
    return Span(
        service=str(line["service"]),
        name=str(line["name"]),
        trace_id=str(line["trace_id"]),
        span_id=str(line["span_id"]),
        parent=line["parent"],
        links=tuple(str(link["span_id"]) for link in line["links"]),
        start_ns=int(line["start_ns"]),
        end_ns=int(line["end_ns"]),
        attributes=dict(line["attributes"]),
        error=line.get("error"),
    )


def _request_ids(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(value) for key, value in attributes.items() if key.endswith("request_id") or key == "request.id")
