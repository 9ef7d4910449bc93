"""Loads by role: who counts as ready, and where waiting prompts belong."""

from __future__ import annotations

import pytest
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.routing.cost import DEFAULT_PREFILL_SPEED
from katydid_gateway.routing.load import EngineState, RankReport, RankState
from katydid_gateway.routing.router import Router
from katydid_gateway.scaling.planner import ScalingTerms
from katydid_gateway.scaling.signals import RoleLoad, role_loads
from katydid_gateway.scaling.watch import ScalingWatch


def engine(name: str, role: str = "both", *, well: bool = True, draining: bool = False, **report: float) -> EngineState:
    ranks = [RankState(RankReport(**report))]  # type: ignore[arg-type]
    return EngineState(name, ranks, excluded="", well=well, draining=draining, role=role)


def test_sums_are_of_the_ready_alone() -> None:
    engines = [
        engine(
            "a", running=3, uncached_tokens=500, prefill_speed=1000, decode_speed=90, free_pages=60, total_pages=100
        ),
        engine("b", waiting=2, uncached_tokens=100, free_pages=100, total_pages=100),
        engine("c", draining=True, running=9, uncached_tokens=9, total_pages=100),
        engine("d", well=False, running=9),
    ]
    load = role_loads(engines, sent_tokens=7000, queued_tokens=400)["both"]
    assert load == RoleLoad(
        ready=2,
        draining=1,
        offered_tokens=7400,
        waiting_tokens=1000,
        prefill_speed=1000 + DEFAULT_PREFILL_SPEED,
        running=3,
        waiting=2,
        decode_speed=90,
        held_pages=40,
        total_pages=200,
    )
    assert load.backlog_s == pytest.approx(1000 / (1000 + DEFAULT_PREFILL_SPEED))
    assert load.cache_pressure == 0.2
    assert load.headroom_s(64) == pytest.approx(160 * 64 / 90)


def test_prompts_belong_to_the_role_that_takes_them() -> None:
    loads = role_loads([engine("p", "prefill"), engine("d", "decode")], sent_tokens=50, queued_tokens=10)
    assert (loads["prefill"].offered_tokens, loads["prefill"].waiting_tokens) == (60, 10)
    assert (loads["decode"].offered_tokens, loads["decode"].waiting_tokens) == (0, 0)


def test_without_an_engine_a_backlog_is_endless() -> None:
    assert RoleLoad(0, waiting_tokens=1).backlog_s == float("inf")
    assert RoleLoad(0).backlog_s == 0
    assert RoleLoad(1, total_pages=9).headroom_s(64) == float("inf")


def test_the_watch_sets_the_gauges() -> None:
    router, metrics = Router(), GatewayMetrics()
    router.engines["a"] = engine("a", prefill_speed=1000, running=5, free_pages=25, total_pages=100)
    watch = ScalingWatch(router, lambda: 2000, metrics, ScalingTerms())
    watch.look(0.0)

    def shown(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"katydid_gateway_{name}", {"role": "both"})

    assert (shown("desired_replicas"), shown("ready_replicas")) == (1, 1)
    assert (shown("prefill_backlog_seconds"), shown("cache_pressure_ratio")) == (2.0, 0.75)
    router.engines["a"].role = "prefill"
    watch.look(5.0)
    assert (shown("desired_replicas"), shown("ready_replicas")) == (1, 0), "a role nobody has keeps its last plan"
