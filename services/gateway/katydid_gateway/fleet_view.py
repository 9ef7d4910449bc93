"""What the fleet is doing now, as one record for people: engines, queues, caches, targets. The console draws it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from katydid_runtime.block_hash import BLOCK_TOKENS
from katydid_runtime.metrics import TPOT_TARGET_S, TTFT_TARGET_S

from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.routing.load import EngineState
from katydid_gateway.routing.router import Router

__all__ = ["fleet_view"]

_SCALING = ("desired_replicas", "ready_replicas", "draining_replicas", "prefill_backlog_seconds")
# Counters, from which whoever asks again makes rates.
_TOTALS = {
    "requests": "finished_requests_total",
    "answered": "ttft_seconds_count",
    "goodput": "goodput_requests_total",
    "prompt_tokens": "prompt_tokens_sum",
    "computed_tokens": "computed_tokens_total",
    "output_tokens": "output_tokens_total",
}


def fleet_view(router: Router, metrics: GatewayMetrics, model: str) -> dict[str, Any]:
    """Plain values, ready for JSON; counters are since the gateway's start, speeds tokens a second."""
    samples = _samples(metrics)
    return {
        "model": model,
        "targets": {"ttft_s": TTFT_TARGET_S, "tpot_s": TPOT_TARGET_S},
        "engines": [_engine(engine) for engine in router.engines.values()],
        "in_flight": _sum(samples, "in_flight_requests"),
        "queued": _by(samples, "queued_requests", "priority"),
        "totals": {name: _sum(samples, metric) for name, metric in _TOTALS.items()},
        "within": {
            "ttft": _sum(samples, "ttft_seconds_bucket", le=str(TTFT_TARGET_S)),
            "tpot": _sum(samples, "tpot_seconds_bucket", le=str(TPOT_TARGET_S)),
            "tpot_of": _sum(samples, "tpot_seconds_count"),
        },
        "cached_tokens": _by(samples, "cached_tokens_total", "tier"),
        "outcomes": _by(samples, "finished_requests_total", "outcome"),
        "tier_speeds": {tier.name.lower(): speed for tier, speed in router.speeds.bytes_per_s.items()},
        "scaling": {name: _by(samples, name, "role") for name in _SCALING},
        "needed": _by(samples, "needed_replicas", "work"),
    }


def _engine(engine: EngineState) -> dict[str, Any]:
    return {
        "name": engine.name,
        "role": engine.role,
        "state": engine.excluded or "ready",
        "well": engine.well,
        "draining": engine.draining,
        "kv_cache": engine.kv_cache_attached,
        "ranks": [
            {
                "running": rank.report.running,
                "waiting": rank.report.waiting,
                "queued_tokens": rank.queued_tokens,
                "prefill_speed": rank.report.prefill_speed,
                "decode_speed": rank.report.decode_speed,
                "held_tokens": (rank.report.total_pages - rank.report.free_pages) * BLOCK_TOKENS,
                "total_tokens": rank.report.total_pages * BLOCK_TOKENS,
            }
            for rank in engine.ranks
        ],
    }


Samples = dict[str, list[tuple[Mapping[str, str], float]]]


def _samples(metrics: GatewayMetrics) -> Samples:
    """The gateway's own samples by name without prefix."""
    samples: Samples = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            name = sample.name.removeprefix("katydid_gateway_")
            samples.setdefault(name, []).append((sample.labels, sample.value))
    return samples


def _sum(samples: Samples, name: str, **chosen: str) -> float:
    return sum(
        value
        for labels, value in samples.get(name, [])
        if all(labels.get(label) == wanted for label, wanted in chosen.items())
    )


def _by(samples: Samples, name: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for labels, value in samples.get(name, []):
        if label in labels:
            sums[labels[label]] = sums.get(labels[label], 0.0) + value
    return sums
