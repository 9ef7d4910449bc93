"""The trace of a request: spans, parents, links, and a TTFT whose parts add up, with delays put into each in turn."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from katydid_gateway.engines.frames import EnginePhase, EngineTrace
from katydid_gateway.request_clock import RequestClock
from katydid_runtime.telemetry import Telemetry

from tests.gateway.mock_engine import MockOptions
from tests.gateway.rig import Rig, rig

PARENT = ("ab" * 16, "cd" * 8)
SPANS = {
    "engine.queue": b"q" * 8,
    "kvcache.lookup": b"l" * 8,
    "kvcache.fetch": b"f" * 8,
    "engine.prefill": b"p" * 8,
    "engine.decode": b"d" * 8,
}


def traced(folder: Path, tmp_path: Path, scenario: Any, **settings: Any) -> list[dict[str, Any]]:
    file = tmp_path / "trace.jsonl"

    async def body() -> None:
        async with rig(folder, trace_file=str(file), **settings) as built:
            await scenario(built)

    asyncio.run(body())
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_spans_parents_and_links(chatml: Path, tmp_path: Path) -> None:
    async def scenario(built: Rig) -> None:
        headers = {"traceparent": f"00-{PARENT[0]}-{PARENT[1]}-01", "tracestate": "a=b"}
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        response = await built.http.post("/v1/chat/completions", json=body, headers=headers)
        assert response.json()["timing"]["trace_id"] == PARENT[0]
        message = built.engines[0].submitted[0]
        assert message.traceparent.split("-")[1] == PARENT[0]
        assert message.tracestate == "a=b"

    spans = traced(chatml, tmp_path, scenario, options=MockOptions(span_ids=SPANS, fetch_s=0.01))
    by_name = {span["name"]: span for span in spans}
    assert len(by_name) == len(spans) == 4
    assert {span["trace_id"] for span in spans} == {PARENT[0]}
    request = by_name["gateway.request"]
    assert request["parent"] == PARENT[1]
    for name in ("gateway.route", "ttft", "tpot"):
        assert by_name[name]["parent"] == request["span_id"], name
    linked = {name: {link["span_id"] for link in by_name[name]["links"]} for name in ("ttft", "tpot")}
    assert linked == {
        "ttft": {SPANS["engine.prefill"].hex(), SPANS["kvcache.fetch"].hex()},
        "tpot": {SPANS["engine.decode"].hex()},
    }
    ttft = by_name["ttft"]
    assert ttft["start_ns"] == request["start_ns"]
    assert ttft["end_ns"] == by_name["tpot"]["start_ns"]
    parts = sum(value for name, value in ttft["attributes"].items() if name.startswith("ttft.") and name != "ttft_ms")
    assert parts == pytest.approx(ttft["attributes"]["ttft_ms"], abs=0.02)
    assert by_name["gateway.route"]["attributes"]["route.engine"] == "engine-0"
    assert request["attributes"]["request.output_tokens"] == 5


def test_an_unsampled_caller_stays_unsampled(chatml: Path, tmp_path: Path) -> None:
    async def scenario(built: Rig) -> None:
        headers = {"traceparent": f"00-{PARENT[0]}-{PARENT[1]}-00"}
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        response = await built.http.post("/v1/chat/completions", json=body, headers=headers)
        assert response.json()["timing"]["trace_id"] == ""
        assert built.engines[0].submitted[0].traceparent.endswith("-00")

    assert traced(chatml, tmp_path, scenario) == []


DELAYS = {
    "tokenise": {"fault_delays": "tokenise:80"},
    "route": {"fault_delays": "route:80"},
    "transport": {"fault_delays": "transport:80"},
    "queue": {"options": MockOptions(queue_s=0.08)},
    "lookup": {"options": MockOptions(lookup_s=0.08)},
    "fetch": {"options": MockOptions(fetch_s=0.08)},
    "prefill": {"options": MockOptions(prefill_s=0.08)},
    "handover": {"options": MockOptions(handover_s=0.08)},
}


@pytest.mark.parametrize("delayed", DELAYS)
def test_a_delay_shows_in_its_own_phase_and_no_other(chatml: Path, delayed: str) -> None:
    async def body() -> list[dict[str, float]]:
        async with rig(chatml, **DELAYS[delayed]) as built:
            return [(await built.chat(max_tokens=2)).json()["timing"]["phases_ms"] for _ in range(5)]

    phases = asyncio.run(body())
    best = {name: min(measured[name] for measured in phases) for name in phases[0]}
    assert best.pop(delayed) > 79
    assert max(best.values()) < 79 / 2, best


def test_the_unexplained_rest_is_usually_small(chatml: Path) -> None:
    async def body() -> list[float]:
        async with rig(chatml) as built:
            answers = [await built.chat(f"hello {number}", max_tokens=2) for number in range(150)]
        return [answer.json()["timing"]["phases_ms"]["rest"] for answer in answers]

    rests = asyncio.run(body())
    assert min(rests) > -0.5
    # The tail belongs to bench/trace_rest.py: on a busy machine it is other processes' time.
    assert sorted(rests)[75] <= 2.0


def test_time_that_no_phase_measures_is_rest() -> None:
    telemetry = Telemetry("gateway")
    clock = RequestClock(telemetry, telemetry.start("gateway.request"), time.time_ns(), time.monotonic_ns())
    clock.received()
    time.sleep(0.03)
    clock.submitted("engine-0")
    phases = (EnginePhase("engine.prefill", b"", 0.02, ""),)
    time.sleep(0.05)
    clock.first_frame(time.monotonic_ns(), EngineTrace(phases, residence_s=0.04, handover_s=0.005))
    assert clock.delivered()
    milliseconds = {name: 1e3 * seconds for name, seconds in clock.phases_s.items()}
    assert milliseconds["prefill"] == pytest.approx(20)
    assert milliseconds["handover"] == pytest.approx(5)
    assert milliseconds["transport"] >= 10
    assert milliseconds["rest"] >= 30 + 15, "between two marks, and within the engine"
    assert sum(milliseconds.values()) == pytest.approx(1e3 * clock.ttft_s)


def test_without_tracing_timing_is_still_measured(chatml: Path) -> None:
    async def body() -> None:
        async with rig(chatml) as built:
            timing = (await built.chat(max_tokens=5)).json()["timing"]
            assert timing["trace_id"] == ""
            assert timing["ttft_ms"] > 0
            assert timing["tpot_ms"] > 0
            assert sum(timing["phases_ms"].values()) == pytest.approx(timing["ttft_ms"], abs=0.02)

    asyncio.run(body())
