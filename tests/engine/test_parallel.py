from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
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
    ],
)
def test_contradictions_name_the_field(fields: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ParallelPlan(**fields)
    assert caught.value.field == field
    assert allowed in str(caught.value.allowed)
    assert f"{field}={fields[field]!r}" in caught.value.message


@given(tp=st.sampled_from([1, 2, 4, 8]), dp=st.integers(1, 8), pp=st.integers(1, 4), wide=st.booleans())
def test_world_size(tp: int, dp: int, pp: int, wide: bool) -> None:
    plan = ParallelPlan(tp=tp, dp=dp, pp=pp, ep=tp * dp if wide else 1, role=Role.PREFILL)
    assert plan.world_size == tp * dp * pp


HY3 = {"num_heads": 64, "num_kv_heads": 8, "num_experts": 192, "num_layers": 80}


@pytest.mark.parametrize("plan", [ParallelPlan(), ParallelPlan(tp=8, sp=True, ep=8), ParallelPlan(dp=8, ep=8)])
def test_plans_that_fit_hy3(plan: ParallelPlan) -> None:
    plan.check_model(**HY3)


@pytest.mark.parametrize(
    ("plan", "model", "message"),
    [
        (ParallelPlan(tp=16), HY3, "tp=16, expected a divisor of num_key_value_heads=8"),
        (ParallelPlan(tp=2), HY3 | {"num_heads": 9, "num_kv_heads": 3}, "a divisor of num_attention_heads=9"),
        (ParallelPlan(dp=5, ep=5), HY3, "ep=5, expected a divisor of num_experts=192"),
        (ParallelPlan(tp=2, ep=2), HY3 | {"num_experts": 0}, "ep=2, expected 1 for a model without experts"),
        (ParallelPlan(pp=81), HY3, "pp=81, expected at most num_hidden_layers=80"),
    ],
)
def test_plans_that_do_not_fit(plan: ParallelPlan, model: dict[str, int], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        plan.check_model(**model)
