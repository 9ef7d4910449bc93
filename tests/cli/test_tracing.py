"""From trace files to a tree and an attribution, with files as they really are: many, torn, mixed."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_cli.tracing.attribution import attribute
from katydid_cli.tracing.spans import Node, Span, choose_trace, parse_spans, read_spans, tree
from katydid_cli.tracing.view import trace
from katydid_runtime.errors import NotFoundError, SettingsError
from katydid_runtime.telemetry import Telemetry
from rich.console import Console


def span(name: str, span_id: str, parent: str | None = None, *, start: float = 0, end: float = 1, **fields) -> Span:
    defaults = {"service": "gateway", "trace_id": "t1", "links": (), "attributes": {}, "error": None}
    return Span(
        name=name,
        span_id=span_id,
        parent=parent,
        start_ns=int(start * 1e9),
        end_ns=int(end * 1e9),
        **(defaults | fields),
    )


REQUEST = [
    span("gateway.request", "a", end=1.0, attributes={"request_id": "r-1"}),
    span("gateway.route", "b", "a", start=0.01, end=0.02),
    span("engine.queue", "c", "a", start=0.02, end=0.05, service="engine"),
    span("kvcache.fetch", "d", "a", start=0.05, end=0.10, service="kvcache"),
    span("engine.prefill", "e", "a", start=0.10, end=0.30, service="engine"),
    span(
        "ttft",
        "f",
        "a",
        end=0.35,
        links=("d", "e"),
        attributes={
            "ttft.queue_ms": 30.0,
            "ttft.fetch_ms": 50.0,
            "ttft.prefill_ms": 200.0,
            "ttft.transport_ms": 68.5,
            "ttft.rest_ms": 9,
        },
    ),
    span("tpot", "g", "a", start=0.35, end=1.0, attributes={"tpot_ms": 31.5}),
]


def test_attribution_adds_up_and_names_what_was_waited_for():
    result = attribute(REQUEST)
    assert result.ttft_s == 0.35
    assert list(result.phases_s) == ["queue", "fetch", "prefill", "transport", "rest"]
    assert result.phases_s["rest"] == pytest.approx(0.0015)
    assert sum(result.phases_s.values()) == pytest.approx(result.ttft_s)
    assert [waited.name for waited in result.waited_for] == ["kvcache.fetch", "engine.prefill"]
    assert result.tpot_s == 0.0315


def test_a_request_without_a_token_has_no_attribution():
    with pytest.raises(NotFoundError, match="no ttft span"):
        attribute(REQUEST[:2])


def test_the_latest_request_is_chosen_or_the_one_asked_for():
    other = span("gateway.request", "z", end=9.0, trace_id="t2ab")
    spans = [*REQUEST, other]
    assert choose_trace(spans) == [other]
    assert choose_trace(spans, "t1") == REQUEST
    assert choose_trace(spans, "T2A") == [other]
    assert choose_trace(spans, "r-1") == REQUEST
    for wanted, complaint in (("t", "2 traces with id t"), ("x", "no trace with id x")):
        with pytest.raises(NotFoundError, match=complaint):
            choose_trace(spans, wanted)
    with pytest.raises(NotFoundError, match="no spans"):
        choose_trace([])


def count(nodes: tuple[Node, ...]) -> int:
    return sum(1 + count(node.children) for node in nodes)


@given(st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=1, max_size=10))
def test_no_span_is_lost_in_the_tree(parents):
    """A parent earlier in the list, or one that is not there."""
    spans = [
        span("s", str(i), None if p is None else (str(p) if p < i else "elsewhere"), start=i)
        for i, p in enumerate(parents)
    ]
    assert count(tree(spans)) == len(spans)


def test_torn_lines_are_counted():
    good = {
        "service": "s",
        "name": "n",
        "trace_id": "t",
        "span_id": "a",
        "parent": None,
        "links": [{"span_id": "b"}],
        "start_ns": 1,
        "end_ns": 2,
        "attributes": {},
        "events": [],
        "error": None,
    }
    spans, broken = parse_spans(
        [json.dumps(good), "", '{"service": "s", "na', "[]", json.dumps(good | {"start_ns": "x"})]
    )
    assert (len(spans), broken, spans[0].links) == (1, 3, ("b",))


def test_what_the_services_write_is_what_is_read(tmp_path):
    gateway = Telemetry("gateway", trace_file=str(tmp_path / "gateway.jsonl"))
    engine = Telemetry("engine", trace_file=str(tmp_path / "engine.jsonl"))
    with gateway.start("gateway.request", attributes={"request_id": "mine"}) as request:
        prefill = engine.record("engine.prefill", request.context, start_ns=10**9, end_ns=2 * 10**9)
        gateway.record(
            "ttft",
            request.context,
            start_ns=10**9,
            end_ns=3 * 10**9,
            links=[prefill],
            attributes={"ttft.prefill_ms": 1000.0},
        )
    gateway.shutdown()
    engine.shutdown()
    spans, broken = read_spans(sorted(tmp_path.glob("*.jsonl")))
    assert broken == 0
    result = attribute(choose_trace(spans, "mine"))
    assert result.phases_s == {"prefill": 1.0, "rest": 1.0}
    assert [waited.service for waited in result.waited_for] == ["engine"]

    out = io.StringIO()
    trace([tmp_path], None, Console(file=out, width=120))
    text = out.getvalue()
    assert "3 spans of engine, gateway" in text
    assert "└─ engine.prefill" in text or "├─ engine.prefill" in text
    assert "→ engine.prefill" in text
    assert "the first token waited for engine.prefill (1000.0 ms)" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_bars_leave_room_for_what_spans_say(tmp_path, width):
    telemetry = Telemetry("gateway", trace_file=str(tmp_path / "gateway.jsonl"))
    with telemetry.start("gateway.request", attributes={"request.id": "r", "route.engine": "engine-0"}):
        pass
    telemetry.shutdown()
    out = io.StringIO()
    trace([tmp_path], None, Console(file=out, width=width))
    assert "█ route.engin" in " ".join(out.getvalue().split())
    assert len(next(line for line in out.getvalue().splitlines() if "█" in line)) <= width


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(SettingsError, match=r"cannot read trace file .*none: No such file"):
        trace([tmp_path / "none"], None)
    with pytest.raises(SettingsError, match=r"holds no \*\.jsonl files"):
        trace([tmp_path], None)
