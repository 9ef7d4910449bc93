"""Plans: how they are spelled, which contradict themselves, a model or a host."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_engine.parallel import ParallelPlan, Role
from katydid_runtime.errors import SettingsError


@pytest.mark.parametrize(
    ("fields", "field", "allowed"),
    [
        ({"tp": 0}, "tp", "an integer >= 1"),
        ({"dp": -2}, "dp", "an integer >= 1"),
        ({"pp": True}, "pp", "an integer >= 1"),
        ({"tp": 2.0}, "tp", "an integer >= 1"),
        ({"sp": True}, "sp", "false when tp=1"),
        ({"tp": 4, "ep": 2}, "ep", "one of [1, 4]"),
        ({"tp": 2, "dp": 4, "ep": 4}, "ep", "one of [1, 2, 8]"),
        ({"dp": 2, "ep": 2, "redundant_experts": 3}, "redundant_experts", "a multiple of ep=2"),
        ({"tp": 2, "ep": 2, "redundant_experts": 2}, "redundant_experts", "0 unless tokens go to experts"),
        ({"tp": 2, "fp8_transfers": True}, "fp8_transfers", "false unless rows are sent"),
        ({"dp": 2, "pp": 2}, "pp", "1 with dp or sp"),
        ({"tp": 2, "dp": 2, "ep": 4}, "sp", "true when ep=tp*dp"),
    ],
)
def test_contradictions_name_the_field(fields: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ParallelPlan(**fields)
    assert caught.value.field == field
    assert allowed in str(caught.value.allowed)
    assert f"{field}={fields.get(field, False)!r}" in caught.value.message


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    tp, dp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 8))
    sp = tp > 1 and draw(st.booleans())
    ep = draw(st.sampled_from([1, tp] if tp > 1 and dp > 1 and not sp else [1, tp, tp * dp]))
    sends = ep > 1 and (sp or (ep == tp * dp and dp > 1))
    return ParallelPlan(
        tp=tp,
        sp=sp,
        dp=dp,
        ep=ep,
        pp=1 if dp > 1 or sp else draw(st.integers(1, 4)),
        role=draw(st.sampled_from(Role)),
        redundant_experts=draw(st.integers(0, 2)) * ep if sends else 0,
        fp8_transfers=(sp or sends) and draw(st.booleans()),
    )


@settings(deadline=None)
@given(plans())
def test_a_plan_is_spelled_in_one_way(plan: ParallelPlan) -> None:
    assert ParallelPlan.parse(str(plan), plan.role) == plan
    assert ParallelPlan.parse(str(plan).replace(",", "", 1), plan.role) == plan


@settings(deadline=None)
@given(plans())
def test_every_rank_has_a_place_of_its_own(plan: ParallelPlan) -> None:
    places = {plan.place(rank) for rank in range(plan.world_size)}
    assert len(places) == plan.world_size == plan.tp * plan.dp * plan.pp
    assert all(place.tp < plan.tp and place.dp < plan.dp and place.pp < plan.pp for place in places)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("single", ParallelPlan()),
        ("tp4,sp", ParallelPlan(tp=4, sp=True)),
        ("dp8ep8", ParallelPlan(dp=8, ep=8)),
        ("ep8+32,fp8,dp8", ParallelPlan(dp=8, ep=8, redundant_experts=32, fp8_transfers=True)),
        ("tp2pp2", ParallelPlan(tp=2, pp=2)),
    ],
)
def test_spelling(text: str, plan: ParallelPlan) -> None:
    assert ParallelPlan.parse(text) == plan


@pytest.mark.parametrize("text", ["", "tp", "tp4,", "tp4 sp", "tp4tp2", "tp4+3", "singletp2", "sp4", "tp4,,sp", "8"])
def test_misspelled(text: str) -> None:
    with pytest.raises(SettingsError, match="expected degrees like tp4,sp"):
        ParallelPlan.parse(text)


HY3 = {"num_heads": 64, "num_kv_heads": 8, "num_experts": 192, "num_layers": 80}


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(),
        ParallelPlan(tp=8, sp=True, ep=8),
        ParallelPlan(dp=8, ep=8, redundant_experts=32),
        ParallelPlan(tp=16),
    ],
)
def test_plans_that_fit_hy3(plan: ParallelPlan) -> None:
    plan.check_model(**HY3)


@pytest.mark.parametrize(
    ("plan", "model", "message"),
    [
        (ParallelPlan(tp=4), HY3 | {"num_kv_heads": 6}, "a divisor or a multiple of num_key_value_heads=6"),
        (ParallelPlan(tp=2), HY3 | {"num_heads": 9, "num_kv_heads": 3}, "a divisor of num_attention_heads=9"),
        (ParallelPlan(dp=5, ep=5), HY3, "ep=5, expected a divisor of num_experts=192"),
        (ParallelPlan(tp=2, ep=2), HY3 | {"num_experts": 0}, "ep=2, expected 1 for a model without experts"),
        (ParallelPlan(pp=81), HY3, "pp=81, expected at most num_hidden_layers=80"),
    ],
)
def test_plans_that_do_not_fit(plan: ParallelPlan, model: dict[str, int], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        plan.check_model(**model)


@pytest.mark.parametrize(
    ("tp", "kv_heads", "held", "first"),
    [(1, 8, 8, [0]), (2, 8, 4, [0, 4]), (4, 2, 1, [0, 0, 1, 1]), (4, 1, 1, [0, 0, 0, 0])],
)
def test_kv_heads_of_a_rank(tp: int, kv_heads: int, held: int, first: list[int]) -> None:
    plan = ParallelPlan(tp=tp)
    assert plan.kv_heads(kv_heads) == held
    assert [plan.first_kv_head(kv_heads, rank) for rank in range(tp)] == first
