"""Where prompts are kept together: as short a prefix as one engine can do the work of, and several homes beyond."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.routing.load import RankReport
from katydid_gateway.routing.prefix_heat import HALF_LIFE_S, PrefixHeat
from katydid_gateway.routing.router import ANOTHER, WARM_UP_S

from tests.gateway.test_router import SPEED, chain, conversation, prompt, router, send


def test_a_cold_prefix_is_kept_together_at_its_beginning() -> None:
    """Gateways that share nothing find one home for siblings that neither has seen."""
    heat = PrefixHeat()
    first, second = chain(*conversation("s", 20), "x"), chain(*conversation("s", 20), "y")
    assert heat.boundary(first, 5000.0, 0.0) == heat.boundary(second, 5000.0, 0.0)
    assert heat.boundary(first, 5000.0, 0.0).depth == 1
    homes = {router(6).decide(prompt(*conversation("s", 20), name), 0.0).chosen.holder for name in "xyz"}  # type: ignore[union-attr]
    assert len(homes) == 1


def test_a_system_prompt_of_everybody_is_cut_deeper() -> None:
    heat = PrefixHeat()
    for number in range(200):
        heat.add(chain(*conversation("system", 4), *conversation(f"c{number % 10}", 12)), 3000, number / 10)
    asked = chain(*conversation("system", 4), *conversation("c3", 12))
    boundary = heat.boundary(asked, 2000.0, 20.0)
    assert boundary.depth == 8
    assert boundary.homes == 1
    assert heat.tokens_per_s(asked[3], 20.0) > 2000.0 > heat.tokens_per_s(asked[7], 20.0)


def test_one_prompt_that_is_too_hot_gets_homes_by_its_work() -> None:
    heat = PrefixHeat()
    asked = chain(*conversation("h", 9))
    for number in range(600):
        heat.add(asked, 500, number / 10)
    boundary = heat.boundary(asked, 1000.0, 60.0)
    assert boundary.depth == 9
    assert boundary.homes == 3
    cooled = heat.boundary(asked, 1000.0, 60.0 + 5 * HALF_LIFE_S)
    assert (cooled.depth, cooled.homes) == (1, 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.floats(1.0, 1e5), st.integers(0, 10**6))
def test_boundaries_are_of_the_chain(blocks: int, speed: float, tokens: int) -> None:
    heat = PrefixHeat()
    asked = chain(*conversation("b", blocks))
    heat.add(asked, tokens, 0.0)
    boundary = heat.boundary(asked, speed, 1.0)
    assert asked[boundary.depth - 1] == boundary.block
    assert boundary.homes >= 1
    assert heat.tokens_per_s(boundary.block, 1.0) <= speed * boundary.homes * 1.0001


def test_heat_stays_within_its_bound() -> None:
    heat = PrefixHeat(capacity_bytes=340 * 50)
    for number in range(1000):
        heat.add(chain(*conversation(f"u{number}", 5)), 100, float(number))
        assert heat.size_bytes <= 340 * 50
    heat.add((), 100, 1000.0)


def test_a_new_engine_gets_cold_prompts_and_is_not_flooded() -> None:
    built = router(4)
    built.engines["e3"].since = WARM_UP_S * 10
    now = WARM_UP_S * 10 + 1
    for state in list(built.engines.values())[:3]:
        state.ranks[0].reported(RankReport(running=4, prefill_speed=SPEED), now)
    took = [send(built, prompt(*conversation(f"n{number}", 4)), number, now) for number in range(20)]
    assert took[0] == "e3"
    assert 5 <= took.count("e3") <= 9
    warm = chain(*conversation("warm", 30))
    built.index.stored(built.decide(prompt("x"), now).candidates[0].holder, warm)
    later = [send(built, prompt(*conversation(f"l{number}", 4)), 100 + number, now + WARM_UP_S) for number in range(8)]
    assert later.count("e3") < len(later)


def test_what_if_there_were_one_more() -> None:
    built = router(2)
    for state in built.engines.values():
        state.ranks[0].report = RankReport(uncached_tokens=50_000, prefill_speed=SPEED)
    asked = prompt(*conversation("a", 10))
    chosen = built.decide(asked, 0.0, another=True).chosen
    assert chosen is not None
    assert (chosen.holder.engine, chosen.prediction.queue_s) == (ANOTHER, 0.0)
    assert ANOTHER not in built.engines
    assert all(candidate.holder.engine != ANOTHER for candidate in built.decide(asked, 0.0).candidates)


def test_a_full_rank_is_avoided() -> None:
    built = router(2)
    built.engines["e0"].ranks[0].report = RankReport(prefill_speed=SPEED, free_pages=2, total_pages=100)
    built.engines["e1"].ranks[0].report = RankReport(prefill_speed=SPEED, free_pages=60, total_pages=100)
    for number in range(12):
        assert built.decide(prompt(f"p{number}", affinity=f"k{number}"), 0.0).candidates[0].holder.engine == "e1"
    full, free = (
        next(c for c in built.decide(prompt("p"), 0.0).candidates if c.holder.engine == name) for name in ("e0", "e1")
    )
    assert full.prediction.pressure_s == pytest.approx(0.05 * 0.18 / 0.02)
    assert free.prediction.pressure_s == 0
