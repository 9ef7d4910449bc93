"""The scaling plan: absolute needs, a forecast over an engine's start, no step down that would be regretted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_gateway.scaling.planner import Planner, ScalingTerms
from katydid_gateway.scaling.signals import RoleLoad

TERMS = ScalingTerms()
SPEED = 10_000.0


def steady(planner: Planner, engines: float, ready: int, seconds: float, start: float = 0.0, offered: float = 0.0):
    """Offer so many engines' work at an even pace; returns the last plan, the time and the tokens offered."""
    now, plan = start, planner.observe(RoleLoad(ready, offered_tokens=offered, prefill_speed=SPEED * ready), start)
    while now < start + seconds:
        now += 5
        offered += engines * SPEED * 5
        plan = planner.observe(RoleLoad(ready, offered_tokens=offered, prefill_speed=SPEED * ready), now)
    return plan, now, offered


@pytest.mark.parametrize("engines", [0.2, 1.0, 3.5, 12.0])
@pytest.mark.parametrize("ready", [1, 4])
def test_even_work_needs_what_it_is_whatever_is_ready(engines: float, ready: int) -> None:
    plan, _, _ = steady(Planner(), engines, ready, 7200)
    assert plan.needed["prefill"] == pytest.approx(engines / TERMS.prefill_share, rel=0.01)
    assert plan.desired == math.ceil(engines / TERMS.prefill_share - 0.05)


def test_a_ramp_is_seen_an_engines_start_ahead() -> None:
    """Work that grows by an engine an hour: the need is that of the moment when an engine asked for now is up."""
    planner, offered, plan = Planner(), 0.0, None
    for step in range(1, 2881):
        now = step * 5.0
        offered += now / 3600 * SPEED * 5
        plan = planner.observe(RoleLoad(4, offered_tokens=offered, prefill_speed=4 * SPEED), now)
    assert plan is not None
    assert plan.needed["prefill"] * TERMS.prefill_share == pytest.approx((now + TERMS.start_s) / 3600, rel=0.02)


def test_a_backlog_asks_for_engines_that_clear_it_in_time() -> None:
    planner = Planner()
    planner.observe(RoleLoad(2, prefill_speed=2 * SPEED), 0)
    plan = planner.observe(RoleLoad(2, prefill_speed=2 * SPEED, waiting_tokens=62 * SPEED), 5)
    assert plan.needed["prefill"] == pytest.approx((62 - 2) / TERMS.clear_s)


def test_slow_tokens_ask_for_decode() -> None:
    load = RoleLoad(4, running=400, decode_speed=400 / 0.06, prefill_speed=4 * SPEED)
    assert Planner().observe(load, 0).needed["decode"] == pytest.approx(4 * 0.06 / 0.04)


def test_held_pages_ask_for_room_and_so_do_choices_that_wait_for_it() -> None:
    full = {"held_pages": 900, "total_pages": 1000, "running": 90, "prefill_speed": 4 * SPEED}
    assert Planner().observe(RoleLoad(4, **full), 0).needed["cache"] == pytest.approx(4 * 0.9 / 0.85)
    assert Planner().observe(RoleLoad(4, waiting=90, **full), 0).needed["cache"] == pytest.approx(4 * 1.8 / 0.85)


def test_a_burst_of_seconds_asks_for_nobody_and_one_of_minutes_does() -> None:
    planner = Planner()
    calm = RoleLoad(4, running=40, decode_speed=40 / 0.02, prefill_speed=4 * SPEED)
    slow = RoleLoad(4, running=40, decode_speed=40 / 0.1, prefill_speed=4 * SPEED)
    for now in range(0, 600, 5):
        steady = planner.observe(calm, now)
    for now in range(600, 615, 5):
        burst = planner.observe(slow, now)
    for now in range(615, 1200, 5):
        lasting = planner.observe(slow, now)
    assert (steady.desired, burst.desired, lasting.desired) == (2, 3, 10)


def test_a_lull_takes_nobody_away_until_it_has_lasted() -> None:
    planner = Planner()
    busy, now, offered = steady(planner, 2.9, 5, 7200)
    lull, now, offered = steady(planner, 0.1, 5, TERMS.hold_s - 10, now, offered)
    assert lull.desired == busy.desired == 5
    after, _, _ = steady(planner, 0.1, 5, 7200, now, offered)
    assert after.desired == 1


def test_while_one_drains_the_plan_does_not_fall_below_the_ready() -> None:
    planner = Planner()
    assert planner.observe(RoleLoad(4, draining=1, prefill_speed=4 * SPEED), 0).desired == 4
    assert planner.observe(RoleLoad(4, prefill_speed=4 * SPEED), TERMS.hold_s + 1).desired == 1


def test_a_new_engine_gets_time_to_warm_up() -> None:
    planner = Planner(ScalingTerms(hold_s=0))
    assert planner.observe(RoleLoad(2, prefill_speed=2 * SPEED), 0).desired == 1, "the first ones are no newcomers"
    assert planner.observe(RoleLoad(3, prefill_speed=3 * SPEED), 10).desired == 3
    assert planner.observe(RoleLoad(3, prefill_speed=3 * SPEED), 10 + TERMS.warm_up_s).desired == 1


def test_without_an_engine_the_last_plan_stands() -> None:
    planner = Planner()
    busy, now, offered = steady(planner, 2.9, 5, 7200)
    assert planner.observe(RoleLoad(0, offered_tokens=offered), now + 5) == busy
    assert Planner().observe(RoleLoad(0), 0).desired == 1


@given(
    st.lists(
        st.builds(
            RoleLoad,
            ready=st.integers(0, 8),
            draining=st.integers(0, 2),
            offered_tokens=st.floats(0, 1e9),
            waiting_tokens=st.floats(0, 1e7),
            prefill_speed=st.just(0.0) | st.floats(1, 1e6),
            running=st.integers(0, 500),
            waiting=st.integers(0, 500),
            decode_speed=st.just(0.0) | st.floats(0.1, 1e5),
            held_pages=st.integers(0, 100),
            total_pages=st.just(100),
        ),
        max_size=20,
    )
)
def test_any_history_gives_a_plan(loads: list[RoleLoad]) -> None:
    planner = Planner()
    for step, load in enumerate(loads):
        plan = planner.observe(load, 5.0 * step)
        assert plan.desired >= 1
        assert all(need >= 0 and math.isfinite(need) for need in plan.needed.values())
        if load.ready:
            assert plan.desired >= max(plan.needed.values()) - 0.05
            assert not load.draining or plan.desired >= load.ready
