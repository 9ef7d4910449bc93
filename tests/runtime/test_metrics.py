"""Metric names and the bounds that make the service-level targets readable."""

from __future__ import annotations

import pytest
from katydid_runtime.metrics import TPOT_SECONDS, TTFT_SECONDS, Metrics


def test_names_carry_service_and_unit():
    metrics = Metrics("engine")
    metrics.counter("evicted_blocks", "Blocks evicted.", ["tier"]).labels("memory").inc(3)
    metrics.gauge("waiting_requests", "Requests waiting.").set(2)
    metrics.histogram("ttft_seconds", "Time to first token.", bounds=TTFT_SECONDS).observe(3.9)
    text = metrics.render()[0].decode()
    assert 'katydid_engine_evicted_blocks_total{tier="memory"} 3.0' in text
    assert "katydid_engine_waiting_requests 2.0" in text
    assert 'katydid_engine_ttft_seconds_bucket{le="4.0"} 1.0' in text
    assert 'katydid_engine_ttft_seconds_bucket{le="3.0"} 0.0' in text
    assert "process_resident_memory_bytes" in text


@pytest.mark.parametrize("name", ["ttft", "ttft_ms", "TTFT_seconds", "seconds", "latency_seconds_total"])
def test_a_name_without_unit_is_refused(name):
    with pytest.raises(ValueError, match="must be snake case and end in one of"):
        Metrics("engine").gauge(name, "x")


def test_the_targets_are_bounds():
    assert 4.0 in TTFT_SECONDS
    assert 0.05 in TPOT_SECONDS
    for bounds in (TTFT_SECONDS, TPOT_SECONDS):
        assert list(bounds) == sorted(set(bounds))


def test_an_openmetrics_scraper_gets_exemplars():
    metrics = Metrics("engine")
    metrics.histogram("ttft_seconds", "Time.", bounds=(1.0, 4.0)).observe(3.0, {"trace_id": "ab12"})
    plain, plain_type = metrics.render("text/plain;version=0.0.4")
    rich, rich_type = metrics.render("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5")
    assert (plain_type.split(";")[0], rich_type.split(";")[0]) == ("text/plain", "application/openmetrics-text")
    assert b"ab12" not in plain
    assert b'le="4.0"} 1.0 # {trace_id="ab12"} 3.0' in rich
    assert rich.endswith(b"# EOF\n")
    assert b"_created" not in plain + rich


def test_registries_are_separate():
    Metrics("engine").gauge("load_ratio", "x")
    Metrics("engine").gauge("load_ratio", "x")
