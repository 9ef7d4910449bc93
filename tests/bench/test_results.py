"""Rows of hy3-tiny's figures: bars and comparisons as the files of a measurement give them."""

from __future__ import annotations

import json
from pathlib import Path

from bench.quality.results import figure_rows, row


def test_bars_are_met_or_missed() -> None:
    assert row("recall.4k.accuracy", 0.9, "share")["met"] is True
    assert row("recall.16k.accuracy", 0.69, "share")["met"] is False
    assert row("training.time", 961.0, "s")["met"] is False
    assert row("tools.exact_rate", 0.5, "share")["bar"] is None


def test_code_is_held_against_the_ngram_and_a_later_file_wins(tmp_path: Path) -> None:
    def file(name: str, value: float) -> Path:
        figure = {
            "name": "code.bits_per_byte",
            "value": value,
            "low": value,
            "high": value,
            "unit": "bit/byte",
            "items": 3,
        }
        path = tmp_path / name
        path.write_text(json.dumps({"results": [{"configuration": name, "figures": [figure]}]}))
        return path

    (made,) = figure_rows([file("a", 1.31), file("b", 1.29)], {"code": 2.0, "text": 3.0})
    assert (made["value"], made["configuration"], made["peer_value"], made["met"]) == (1.29, "b", 2.0, True)
    (made,) = figure_rows([file("c", 1.31)], {"code": 2.0})
    assert made["met"] is False
    assert made["bar"].startswith("<= 1.3000")
