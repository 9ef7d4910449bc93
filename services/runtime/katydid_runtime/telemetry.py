"""Tracing of one process: OpenTelemetry spans, exported over OTLP, to a file, or nowhere at no cost.

    telemetry = Telemetry("engine", trace_file="trace.jsonl")
    with telemetry.start("gateway.request", parent=TraceContext.from_headers(headers)) as span:
        metadata = span.headers()                      # to send on
    context = telemetry.record("engine.prefill", parent, start_ns=t0, end_ns=t1, attributes={"tokens": 4096})
    telemetry.shutdown()

Parents are always passed, never taken from ambient state: a step loop works for many requests at once. The caller's
sampling decision is kept; without a caller `sample_ratio` decides. When tracing is off OpenTelemetry is not imported,
and a span's context is its parent's, so a trace passes through the process unbroken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from katydid_runtime import log
from katydid_runtime.errors import InvalidRequestError, SettingsError
from katydid_runtime.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import Link, SpanContext, Tracer
    from opentelemetry.trace import Span as OtelSpan

__all__ = ["Attributes", "Span", "Telemetry"]

Attributes = Mapping[str, str | bool | int | float]

_EXPORT_DELAY_MS = 200
_OTLP_TIMEOUT_S = 5


class Telemetry:
    """The tracer of a process. Spans are exported by a background thread within 0.2 s.

    Raises SettingsError when the trace file cannot be written or the OpenTelemetry packages are missing.
    """

    def __init__(
        self,
        service: str,
        *,
        trace_file: str | None = None,
        otlp_endpoint: str | None = None,
        sample_ratio: float = 1.0,
    ) -> None:
        self._provider: TracerProvider | None = None
        self._tracer: Tracer | None = None
        self._given_id = threading.local()
        if trace_file is None and otlp_endpoint is None:
            return
        try:
            exporters = _exporters(service, trace_file, otlp_endpoint)
            self._provider = _provider(service, exporters, sample_ratio, _ids(self._given_id))
        except ImportError as error:
            raise SettingsError(f"tracing needs the package {error.name}, which is not installed") from error
        self._tracer = self._provider.get_tracer("katydid")

    @property
    def enabled(self) -> bool:
        return self._tracer is not None

    def start(
        self,
        name: str,
        parent: TraceContext | None = None,
        *,
        links: Sequence[TraceContext] = (),
        start_ns: int | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        """Open a span below `parent` (a new trace without one), now or at `start_ns` (Unix nanoseconds)."""
        if self._tracer is None:
            return Span(None, parent)
        span = self._tracer.start_span(
            name,
            context=_otel_parent(parent),
            links=[_otel_link(link) for link in links],
            start_time=start_ns,
            attributes=attributes,
        )
        return Span(span, _own_context(span))

    def record(
        self,
        name: str,
        parent: TraceContext | None,
        *,
        start_ns: int,
        end_ns: int,
        links: Sequence[TraceContext] = (),
        attributes: Attributes | None = None,
        span_id: bytes = b"",
    ) -> TraceContext | None:
        """Export a span that is already over, such as one measured in a worker process; returns its context.

        `span_id` is its 8-byte id where that had to be known before: other spans hang under it already.
        """
        self._given_id.value = int.from_bytes(span_id, "big")
        span = self.start(name, parent, links=links, start_ns=start_ns, attributes=attributes)
        self._given_id.value = 0
        span.end(end_ns)
        return span.context

    def shutdown(self) -> None:
        """Export what is pending, for a few seconds at most, and stop. Blocks: call it after the loop has ended."""
        if self._provider is not None:
            self._provider.shutdown()


class Span:
    """An open span; as a context manager it ends with its block, records an exception, and puts its trace id in logs.

    `context` is None only when tracing is off and there was no parent.
    """

    __slots__ = ("_binding", "_span", "context")

    def __init__(self, span: OtelSpan | None, context: TraceContext | None) -> None:
        self._span = span
        self.context = context
        self._binding = log.bind(trace=context.trace_id) if context is not None else None

    @property
    def recording(self) -> bool:
        """Whether attributes set now will be seen by anyone."""
        return self._span is not None and self._span.is_recording()

    def headers(self) -> tuple[tuple[str, str], ...]:
        """The pairs that carry this span as parent to another process."""
        return self.context.headers() if self.context is not None else ()

    def set(self, **attributes: str | bool | int | float) -> None:
        if self._span is not None:
            self._span.set_attributes(attributes)

    def set_all(self, attributes: Attributes) -> None:
        """`set` for names with dots in them."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def event(self, name: str, **attributes: str | bool | int | float) -> None:
        if self._span is not None:
            self._span.add_event(name, attributes)

    def link(self, context: TraceContext) -> None:
        """Add a link found out while the span is open."""
        if self._span is not None:
            self._span.add_link(_otel_context(context))

    def fail(self, error: BaseException) -> None:
        """Mark the span as failed by `error`; its message is recorded, its traceback belongs to the log.

        Of a request that is wrong the field alone is recorded: the message may hold what somebody wrote.
        """
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", getattr(error, "reason", type(error).__name__))
            wrong = f"{error.reason} in {error.field}" if isinstance(error, InvalidRequestError) else str(error)
            self._span.set_status(StatusCode.ERROR, wrong)

    def end(self, end_ns: int | None = None) -> None:
        if self._span is not None:
            self._span.end(end_ns if end_ns is not None else time.time_ns())

    def __enter__(self) -> Self:
        if self._binding is not None:
            self._binding.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._binding is not None:
            self._binding.__exit__(kind, error, traceback)
        if error is not None:
            self.fail(error)
        self.end()


def _exporters(service: str, trace_file: str | None, otlp_endpoint: str | None) -> list[SpanExporter]:
    exporters: list[SpanExporter] = []
    if trace_file is not None:
        from katydid_runtime.trace_file import TraceFileExporter

        exporters.append(TraceFileExporter(service, trace_file))
    if otlp_endpoint is not None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        insecure = not otlp_endpoint.startswith("https://")
        exporters.append(OTLPSpanExporter(endpoint=otlp_endpoint, insecure=insecure, timeout=_OTLP_TIMEOUT_S))
    return exporters


def _ids(given: threading.local) -> IdGenerator:
    """Random ids, but for a span whose id this thread has in `given.value`."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class GivenOrRandom(RandomIdGenerator):
        def generate_span_id(self) -> int:
            return getattr(given, "value", 0) or super().generate_span_id()

    return GivenOrRandom()


def _provider(service: str, exporters: Sequence[SpanExporter], sample_ratio: float, ids: IdGenerator) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        id_generator=ids,
        resource=Resource.create({"service.name": f"katydid-{service}", "service.namespace": "katydid"}),
        shutdown_on_exit=False,
    )
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_DELAY_MS))
    return provider


def _otel_context(context: TraceContext) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(context.sampled)),
        trace_state=TraceState.from_header([context.tracestate]) if context.tracestate else None,
    )


def _otel_parent(parent: TraceContext | None) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    # An explicit empty context: whatever span is current in this task is not the parent.
    return Context() if parent is None else set_span_in_context(NonRecordingSpan(_otel_context(parent)), Context())


def _otel_link(context: TraceContext) -> Link:
    from opentelemetry.trace import Link

    return Link(_otel_context(context))


def _own_context(span: OtelSpan) -> TraceContext:
    own = span.get_span_context()
    state = own.trace_state.to_header() if own.trace_state else ""
    return TraceContext(f"{own.trace_id:032x}", f"{own.span_id:016x}", own.trace_flags.sampled, state)
