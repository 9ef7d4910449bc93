"""Every figure of bench/results tells what it is held against, and whether it holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
KEYS = {"figure", "value", "unit", "floor", "peer", "peer_value", "bar", "met"}


def rows() -> dict[str, list[dict[str, Any]]]:
    read = {path.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {name: content["rows"] for name, content in read.items() if "rows" in content}


ROWS = rows()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_every_key(name: str) -> None:
    short = {row.get("figure", "?"): sorted(KEYS - row.keys()) for row in ROWS[name] if KEYS - row.keys()}
    assert not short


@pytest.mark.parametrize("name", ROWS)
def test_a_figure_stands_once(name: str) -> None:
    figures = [(row["figure"], row.get("part"), row.get("configuration")) for row in ROWS[name]]
    assert len(set(figures)) == len(figures)


@pytest.mark.parametrize("name", ROWS)
def test_a_measured_value_with_a_bar_is_met_or_missed(name: str) -> None:
    def told(row: dict[str, Any]) -> bool:
        held = row["bar"] is not None and row["value"] is not None
        return row["met"] is not None if held else row["met"] is not True

    assert [row["figure"] for row in ROWS[name] if not told(row)] == []


@pytest.mark.parametrize("name", ROWS)
def test_values_are_numbers(name: str) -> None:
    odd = [row["figure"] for row in ROWS[name] if isinstance(row["value"], float) and not math.isfinite(row["value"])]
    assert not odd
