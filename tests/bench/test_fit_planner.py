"""The planner's speeds are those of the measured slice, and predict what was left out of the fit."""

from __future__ import annotations

import json

import pytest
from katydid_engine.planning.measured import measured

from bench.fit_planner import SLICE, fitted, held_out

ROWS = {row["figure"]: row for row in json.loads(SLICE.read_text())["rows"]}


def test_what_is_committed_is_what_is_fitted() -> None:
    speeds = measured("h200")
    values, points = fitted(ROWS)
    assert {name: speeds[name] for name in values} == pytest.approx(
        {name: value for name, (value, _) in values.items()}, rel=6e-3
    )
    for tokens, seconds in points["experts"].items():
        assert speeds.sliced_experts_s(8, tokens) == pytest.approx(seconds, rel=1e-3)
    for rows, seconds in points["linear"].items():
        assert speeds.linear_s(rows) == pytest.approx(seconds, rel=1e-3)
    for rows, seconds in points["element_wise"].items():
        assert speeds.element_wise_s(rows) == pytest.approx(seconds, rel=1e-3)


def test_predictions_of_what_was_left_out() -> None:
    left_out = [row for row in held_out(ROWS, measured("h200")) if not row["fitted"]]
    assert len(left_out) >= 10
    assert all(row["met"] for row in left_out)
