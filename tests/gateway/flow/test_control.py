"""Admission on paper: who is taken depends on the wait at the gate, the caller's own deadline, and who could work."""

from __future__ import annotations

import pytest
from katydid_gateway.flow.budgets import TenantTerms
from katydid_gateway.flow.control import FlowControl
from katydid_gateway.flow.fair_queue import PriorityClass, Ticket
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.routing.cost import Prediction
from katydid_gateway.routing.load import EngineState, RankReport, RankState
from katydid_gateway.routing.router import Router
from katydid_runtime.errors import OverloadedError

SPEED = 10_000.0
AT_ONCE = Prediction(0.0, 0.0, 0.1, 0, 0, 1000)


def engine(name: str, waiting_tokens: int, role: str = "both", excluded: str = "") -> EngineState:
    rank = RankState(RankReport(uncached_tokens=waiting_tokens, prefill_speed=SPEED))
    return EngineState(name, [rank], role=role, excluded=excluded)


def flow(*engines: EngineState, ttft_limit_s: float = 0.0) -> FlowControl:
    router = Router({each.name: each for each in engines})
    return FlowControl(
        router,
        lambda _tenant: TenantTerms(),
        GatewayMetrics(),
        engine_queue_s=2.0,
        max_queued=10,
        ttft_limit_s=ttft_limit_s,
    )


@pytest.mark.parametrize(
    ("limit_s", "timeout_s", "taken"), [(6.0, 100.0, True), (4.0, 100.0, False), (6.0, 4.0, False), (0.0, 4.0, False)]
)
def test_the_wait_at_the_gate_counts_and_the_nearer_of_two_limits(
    limit_s: float, timeout_s: float, taken: bool
) -> None:
    """Five seconds of prompts wait here already."""
    built = flow(engine("e", 100_000), ttft_limit_s=limit_s)
    built.gate.queue.push(Ticket("a", 50_000, PriorityClass.NORMAL, 0.0))
    if taken:
        built.admit("b", 0, AT_ONCE, timeout_s)
        return
    with pytest.raises(OverloadedError, match=r"would come in 5\.1 s") as refused:
        built.admit("b", 0, AT_ONCE, timeout_s)
    assert refused.value.retry_after_s == pytest.approx(5.1 - min(timeout_s, limit_s or timeout_s))


def test_a_deadline_that_has_passed_is_no_lateness() -> None:
    flow(engine("e", 100_000)).admit("a", 0, AT_ONCE, -1.0)


def test_the_gate_is_open_while_one_that_computes_prompts_has_little_waiting() -> None:
    busy, idle = engine("busy", 20_000), engine("idle", 19_999)
    assert not flow(busy).gate.open
    assert flow(busy, idle).gate.open
    # Nobody waits for one that cannot take it: routing says at once that there is none.
    assert flow().gate.open
    assert flow(engine("gone", 0, excluded="not connected")).gate.open
    assert not flow(busy, engine("gone", 0, excluded="not connected")).gate.open
    assert not flow(busy, engine("continues", 0, role="decode")).gate.open
    assert not flow(engine("prefill", 20_000, role="prefill"), engine("continues", 0, role="decode")).gate.open
