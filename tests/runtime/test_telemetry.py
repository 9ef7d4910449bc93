"""Spans through the real SDK into a file: parents, links, times, sampling, and silence when off."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_runtime import log
from katydid_runtime.errors import OverloadedError, SettingsError
from katydid_runtime.telemetry import Telemetry
from katydid_runtime.trace_context import TraceContext
from katydid_runtime.trace_file import TraceFileExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

PARENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", True, "vendor=1")


@pytest.fixture
def spans(tmp_path):
    """A telemetry that writes to a file; a call shuts it down and returns its spans by name."""
    path = tmp_path / "trace.jsonl"
    telemetry = Telemetry("sample", trace_file=str(path))

    def finished() -> dict[str, dict[str, object]]:
        telemetry.shutdown()
        return {span["name"]: span for span in map(json.loads, path.read_text().splitlines())}

    finished.telemetry = telemetry
    return finished


def test_a_span_hangs_under_its_remote_parent_and_carries_everything(spans):
    other = TraceContext("1" * 32, "2" * 16)
    with spans.telemetry.start("gateway.request", PARENT, attributes={"gen_ai.request.model": "m"}) as span:
        assert span.recording
        span.set(tokens=3)
        span.set_all({"http.status": 200})
        span.event("first_token", index=0)
        span.link(other)
        assert dict(span.headers()) == {"traceparent": span.context.traceparent, "tracestate": "vendor=1"}
        child = spans.telemetry.record("engine.prefill", span.context, start_ns=5, end_ns=9, links=[other])
    by_name = spans()
    request, prefill = by_name["gateway.request"], by_name["engine.prefill"]
    assert (request["trace_id"], request["parent"]) == (PARENT.trace_id, PARENT.span_id)
    assert request["attributes"] == {"gen_ai.request.model": "m", "tokens": 3, "http.status": 200}
    assert request["events"][0]["name"] == "first_token"
    assert request["links"] == [{"trace_id": other.trace_id, "span_id": other.span_id}]
    assert abs(request["end_ns"] - time.time_ns()) < 60e9
    assert (prefill["parent"], prefill["span_id"]) == (request["span_id"], child.span_id)
    assert (prefill["start_ns"], prefill["end_ns"], prefill["service"]) == (5, 9, "sample")
    assert prefill["links"] == request["links"]


def test_a_span_known_by_its_id_before_it_is_recorded(spans):
    known = bytes.fromhex("00f067aa0ba902b7")
    spans.telemetry.record("child", PARENT.span(known), start_ns=6, end_ns=7)
    assert spans.telemetry.record("parent", PARENT, start_ns=5, end_ns=9, span_id=known) == PARENT.span(known)
    spans.telemetry.record("other", PARENT, start_ns=5, end_ns=9)
    by_name = spans()
    assert by_name["child"]["parent"] == by_name["parent"]["span_id"] == known.hex() != by_name["other"]["span_id"]


def test_a_failure_is_recorded_and_raised_on(spans):
    with pytest.raises(OverloadedError), spans.telemetry.start("request"):
        raise OverloadedError("queue is full")
    span = spans()["request"]
    assert (span["error"], span["attributes"]["error.type"]) == ("queue is full", "OVERLOADED")


def test_a_span_is_no_parent_unless_passed(spans):
    with spans.telemetry.start("one"), spans.telemetry.start("two"):
        pass
    by_name = spans()
    assert by_name["two"]["parent"] is None
    assert by_name["one"]["trace_id"] != by_name["two"]["trace_id"]


def test_the_callers_sampling_decision_is_kept(tmp_path):
    path = tmp_path / "trace.jsonl"
    telemetry = Telemetry("sample", trace_file=str(path), sample_ratio=0.0)
    unsampled = TraceContext(PARENT.trace_id, PARENT.span_id, sampled=False)
    with telemetry.start("root") as root, telemetry.start("child", root.context):
        assert not root.recording
        assert not root.context.sampled
    telemetry.record("kept", PARENT, start_ns=1, end_ns=2)
    telemetry.record("dropped", unsampled, start_ns=1, end_ns=2)
    telemetry.shutdown()
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["kept"]


def test_logs_inside_a_span_carry_its_trace_id(spans):
    async def scenario():
        with spans.telemetry.start("request") as span:
            await asyncio.sleep(0)
            assert log.trace_id.get() == span.context.trace_id
        assert log.trace_id.get() == ""

    asyncio.run(scenario())


def test_spans_appear_while_the_process_runs(tmp_path):
    path = tmp_path / "trace.jsonl"
    telemetry = Telemetry("sample", trace_file=str(path))
    telemetry.start("request").end()
    deadline = time.monotonic() + 5
    while not path.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.read_text()
    telemetry.shutdown()


def test_spans_reach_an_otlp_collector():
    """A collector of our own, over a real connection: names, ids and the resource arrive."""
    received: list[ExportTraceServiceRequest] = []

    class Collector(TraceServiceServicer):
        def Export(self, request, context):
            received.append(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    telemetry = Telemetry("sample", otlp_endpoint=f"http://127.0.0.1:{port}")
    context = telemetry.record("engine.prefill", PARENT, start_ns=5, end_ns=9, attributes={"tokens": 3})
    telemetry.shutdown()
    server.stop(None)
    (resource,) = received[0].resource_spans
    (span,) = resource.scope_spans[0].spans
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "katydid-sample"
    assert (span.name, span.span_id.hex(), span.parent_span_id.hex()) == (
        "engine.prefill",
        context.span_id,
        PARENT.span_id,
    )
    assert (span.trace_id.hex(), span.start_time_unix_nano, span.end_time_unix_nano) == (PARENT.trace_id, 5, 9)


def test_a_collector_that_is_away_delays_the_end_by_seconds_at_most():
    telemetry = Telemetry("sample", otlp_endpoint="http://127.0.0.1:1")
    telemetry.start("request").end()
    started = time.monotonic()
    telemetry.shutdown()
    assert time.monotonic() - started < 10


def test_off_passes_the_trace_through_and_imports_nothing():
    code = """
import sys
from katydid_runtime.telemetry import Telemetry
from katydid_runtime.trace_context import TraceContext
telemetry = Telemetry("sample")
parent = TraceContext("1" * 32, "2" * 16)
with telemetry.start("request", parent) as span:
    span.set(a=1); span.event("e"); span.link(parent); span.fail(ValueError())
    assert span.context == parent and not span.recording and not telemetry.enabled
assert telemetry.record("x", None, start_ns=1, end_ns=2) is None
telemetry.shutdown()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_spans_that_a_full_disk_does_not_take_are_missed_once(tmp_path, caplog):
    path = tmp_path / "trace.jsonl"
    exporter = TraceFileExporter("sample", str(path))
    span = TracerProvider().get_tracer("sample").start_span("one")
    assert isinstance(span, ReadableSpan)
    span.end()
    descriptor, exporter._descriptor = exporter._descriptor, os.open("/dev/full", os.O_WRONLY)
    for _ in range(3):
        assert exporter.export([span]) is SpanExportResult.FAILURE
    (said,) = caplog.messages
    assert "trace.jsonl: No space left on device" in said
    os.close(exporter._descriptor)
    os.write(descriptor, b'{"half": ')
    exporter._descriptor = descriptor
    assert exporter.export([span]) is SpanExportResult.SUCCESS
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()[1:]] == ["one"]
    exporter.shutdown()


def test_an_unwritable_trace_file_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"cannot write trace file .*none/trace.jsonl: No such file"):
        Telemetry("sample", trace_file=str(tmp_path / "none" / "trace.jsonl"))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(SettingsError, match="tracing needs the package"):
        Telemetry("sample", otlp_endpoint="http://127.0.0.1:4317")


@given(
    st.text("0123456789abcdef", min_size=32, max_size=32),
    st.text("0123456789abcdef", min_size=16, max_size=16),
    st.booleans(),
)
def test_traceparent_round_trip(trace_id, span_id, sampled):
    context = TraceContext(trace_id, span_id, sampled)
    expected = context if int(trace_id, 16) and int(span_id, 16) else None
    assert TraceContext.parse(context.traceparent) == expected


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
        "ff-" + "1" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "1" * 16 + "-01-more",
        "00-" + "A" * 32 + "-" + "1" * 16 + "-01",
    ],
)
def test_a_malformed_traceparent_is_absent(traceparent):
    assert TraceContext.parse(traceparent) is None


def test_a_later_version_may_say_more():
    context = TraceContext.parse("01-" + "1" * 32 + "-" + "2" * 16 + "-00-more")
    assert context == TraceContext("1" * 32, "2" * 16, sampled=False)


def test_headers_of_grpc_and_of_asgi():
    pairs = PARENT.headers()
    assert TraceContext.from_headers(pairs) == PARENT
    assert TraceContext.from_headers([(k.title().encode(), v.encode()) for k, v in pairs]) == PARENT
    assert TraceContext.from_headers([("other", "x")]) is None
    assert TraceContext.from_headers([*pairs[:1], ("tracestate", "x" * 600)]).tracestate == ""


def test_a_sibling_by_its_span_id():
    assert PARENT.span(bytes.fromhex("00f067aa0ba902b7")).traceparent == (
        "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"
    )
