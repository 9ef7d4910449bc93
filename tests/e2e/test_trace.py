"""One request is one trace over three processes: its spans, parents and links, whom a delay is charged to, and how
little of the time to first token stays unexplained."""

from __future__ import annotations

import io
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import grpc
import httpx
import pytest
from katydid.gateway.v1 import gateway_pb2
from katydid.gateway.v1.gateway_pb2_grpc import InferenceServiceStub
from katydid_cli.tracing.spans import Span
from katydid_cli.tracing.view import trace
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from tests.e2e.fleet import MODEL, Process
from tests.e2e.trace_lab import DELAYS_MS, Lab, running_lab

pytestmark = pytest.mark.e2e

CALLER = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
REPEATS = 5
MARGIN_MS = 100
SEQUENTIAL = 50
REST_MS = 2.0


@pytest.fixture(scope="module")
def lab(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tiny, tmp_path_factory.mktemp("trace")) as running:
        yield running


def prompt(blocks: int) -> str:
    """A byte is a token: so many blocks of 64, and a little more."""
    return "".join(f"{number:>8}" for number in range(8 * blocks)) + "tail"


@pytest.fixture(scope="module")
def spans(lab: Lab) -> list[Span]:
    """Of a request whose first two blocks are in the cache service's memory, the next four on its disk alone."""
    line = lab.plain
    line.store(prompt(6))
    line.kvcache.terminate()
    assert line.kvcache.exit_code() == 0
    line.kvcache.start()
    line.ready()
    line.complete(prompt(2), max_tokens=1)
    line.empty_engine()
    answer = line.complete(prompt(6), max_tokens=5, headers={"traceparent": CALLER, "tracestate": "vendor=1"})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] == {
        "device": 0,
        "memory": 128,
        "disk": 256,
        "shared": 0,
    }
    assert answer["timing"]["trace_id"] == CALLER.split("-")[1]
    return lab.spans(CALLER.split("-")[1], count=13)


def test_names_and_parents(spans: list[Span]) -> None:
    """The caller's span is over the request, the phases under it, the cache service's work under its phase."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)

    def path(span: Span) -> str:
        parent = by_id.get(span.parent or "")
        own = f"{span.service}:{span.name}"
        return f"{path(parent)} > {own}" if parent is not None else own

    top = "gateway:gateway.request"
    assert Counter(path(span) for span in spans) == {
        top: 1,
        f"{top} > gateway:gateway.route": 1,
        f"{top} > engine:engine.queue": 1,
        f"{top} > engine:kvcache.lookup": 1,
        f"{top} > engine:kvcache.lookup > kvcache:kvcache.service.lookup": 1,
        f"{top} > engine:kvcache.fetch": 2,
        f"{top} > engine:kvcache.fetch > kvcache:kvcache.service.get": 2,
        f"{top} > engine:engine.prefill": 1,
        f"{top} > engine:engine.decode": 1,
        f"{top} > gateway:ttft": 1,
        f"{top} > gateway:tpot": 1,
    }
    (root,) = [span for span in spans if span.name == "gateway.request"]
    assert root.parent == CALLER.split("-")[2]


def test_links(spans: list[Span]) -> None:
    def ids(*names: str) -> set[str]:
        return {span.span_id for span in spans if span.name in names}

    links = {span.name: set(span.links) for span in spans if span.links}
    assert links == {"ttft": ids("engine.prefill", "kvcache.fetch"), "tpot": ids("engine.decode")}


def test_one_fetch_a_tier_and_each_read_what_it_says(spans: list[Span]) -> None:
    tiers = {span.attributes["katydid.tier"]: span.span_id for span in spans if span.name == "kvcache.fetch"}
    sent = {span.parent: span.attributes["kvcache.blocks.sent"] for span in spans if span.name == "kvcache.service.get"}
    assert sent == {tiers["memory"]: 2, tiers["disk"]: 4}


def test_engine_phases_follow_each_other_within_the_request(spans: list[Span]) -> None:
    phases = sorted((span for span in spans if span.service == "engine"), key=lambda span: (span.start_ns, span.end_ns))
    names = [span.name.partition(".")[2] for span in phases]
    assert names == ["queue", "lookup", "fetch", "fetch", "prefill", "decode"]
    assert all(before.end_ns == after.start_ns for before, after in pairwise(phases))
    (request,) = [span for span in spans if span.name == "gateway.request"]
    assert request.start_ns <= phases[0].start_ns
    assert phases[-1].end_ns <= request.end_ns


def test_the_command_prints_the_tree(lab: Lab, spans: list[Span]) -> None:
    out = io.StringIO()
    trace([lab.trace_file], spans[0].trace_id, Console(file=out, width=140))
    text = out.getvalue()
    assert "13 spans of engine, gateway, kvcache" in text
    for phase, served in (("kvcache.lookup", "kvcache.service.lookup"), ("kvcache.fetch", "kvcache.service.get")):
        assert f"\n├─ {phase} " in text, text
        assert f"\n│  └─ {served} " in text, text
    assert "→ kvcache.fetch memory, kvcache.fetch disk, engine.prefill" in text
    assert "→ engine.decode" in text


def test_otlp_carries_the_same_trace(lab: Lab, spans: list[Span]) -> None:
    # The file and the collector are written by exporters of their own, each with its own batches.
    deadline = time.monotonic() + 30
    while len(exported := lab.collector.spans(spans[0].trace_id)) < len(spans) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert exported == {
        span.span_id: (f"katydid-{span.service}", span.name, span.parent or "", frozenset(span.links)) for span in spans
    }


def test_a_grpc_callers_trace_goes_on(lab: Lab) -> None:
    caller = CALLER.replace("ab", "ef")
    with grpc.insecure_channel(lab.plain.gateway.address) as channel:
        request = gateway_pb2.GenerateRequest(model=MODEL, prompt=gateway_pb2.Prompt(text="hello"))
        request.sampling.max_tokens = 2
        call = InferenceServiceStub(channel).Generate(request, metadata=(("traceparent", caller),), timeout=30)
        assert list(call)
    spans = lab.spans(caller.split("-")[1], count=6)
    (root,) = [span for span in spans if span.name == "gateway.request"]
    assert root.parent == caller.split("-")[2]


@pytest.fixture(scope="module")
def usual(lab: Lab) -> dict[str, float]:
    """Medians with nothing delayed."""
    return lab.plain.measure(prompt(3), REPEATS)


@pytest.mark.parametrize("service", DELAYS_MS)
def test_delays_grow_their_phases_and_no_others(lab: Lab, service: str) -> None:
    """By as much as each, with margins: medians of a machine busy with other things move by tens of milliseconds."""
    growth = lab.slow[service].growth(lab.plain, prompt(3), REPEATS)
    slowed = {phase for delays in DELAYS_MS.values() for phase in delays}
    assert {"receive", "prepare", "handover", "deliver", "rest", *slowed} <= growth.keys()
    for phase, change in growth.items():
        delay = DELAYS_MS[service].get(phase, 0)
        assert 0.9 * delay - (MARGIN_MS if not delay else 0) < change < delay + MARGIN_MS, (phase, growth)


def test_next_to_nothing_stays_unexplained(lab: Lab) -> None:
    """Phases lie edge to edge: between one mark and the next are microseconds, however long the phases are.

    A busy machine may take the CPU away between two marks, though seldom; so the middle request is looked at. How
    large the 99th percentile is on a quiet machine, ``bench/trace_rest.py`` tells.
    """
    rests = []
    for number in range(SEQUENTIAL):
        timing = lab.plain.complete(f"{number} hello", max_tokens=2)["timing"]
        phases = timing["phases_ms"]
        assert sum(phases.values()) == pytest.approx(timing["ttft_ms"], abs=0.02)
        assert all(milliseconds >= 0 for name, milliseconds in phases.items() if name != "rest"), phases
        rests.append(phases["rest"])
    assert abs(statistics.median(rests)) < REST_MS


# Bounds that must be there, and how near their neighbours must be: those with a target of their own nearest.
TARGETS = {
    "katydid_gateway_ttft_seconds": (4.0, 0.25),
    "katydid_gateway_tpot_seconds": (0.05, 0.25),
    "katydid_engine_phase_seconds": (4.0, 0.25),
    "katydid_engine_step_seconds": (0.05, 0.5),
    "katydid_kvcache_lookup_seconds": (0.05, 0.5),
    "katydid_kvcache_get_seconds": (0.05, 0.5),
}


def test_histograms_show_the_targets(lab: Lab, usual: dict[str, float]) -> None:
    """TTFT 4 s and TPOT 50 ms can be read off a scrape, and it counts the requests before."""
    histograms: dict[str, dict[float, float]] = {}
    for process in (lab.plain.gateway, lab.plain.engine, lab.plain.kvcache):
        histograms |= scrape(process)
    for name, (target, nearness) in TARGETS.items():
        counts = histograms[name]
        bounds = sorted(counts)
        place = bounds.index(target)
        assert bounds[place - 1] >= (1 - nearness) * target, name
        assert bounds[place + 1] <= (1 + nearness) * target, name
        assert 0 < counts[target] <= counts[float("inf")], name
    slow = scrape(lab.slow["engine"].gateway)["katydid_gateway_ttft_seconds"]
    assert slow[0.1] == 0 < slow[4.0], "no request was faster than its delay"


def scrape(process: Process) -> dict[str, dict[float, float]]:
    """Cumulative counts by bound of every histogram, over all labels."""
    text = httpx.get(f"http://{process.http}/metrics", timeout=30).text
    found: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(text):
        if family.type == "histogram":
            counts = found[family.name] = defaultdict(float)
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    counts[float(sample.labels["le"])] += sample.value
    return found
