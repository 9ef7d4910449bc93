"""Bars of the workload's figures, and the load that holds."""

from __future__ import annotations

from typing import Any

from bench.workload_results import barred, sustained

LINKS = ", with the link model"


def load(rate: str, share: float, kind: str = "") -> dict[str, Any]:
    figure = f"simulated, {rate} requests a second offered{kind}: TTFT < 4 s and TPOT < 50 ms"
    more = {"requests_per_s": 1, "ttft_s": {}, "tpot_s": {}, "prompt_mean": 1, "cached_share": 0.8}
    return {"figure": figure, "value": share, "unit": "of requests", **more}


def test_the_most_that_holds() -> None:
    rows = [load("1", 1.0), load("2.5", 0.96), load("3", 0.9), load("0.1", 0.94, LINKS), load("1", 0.2, LINKS)]
    found = sustained(rows)
    assert [(made["value"], made["share"], made["met"]) for made in found] == [(2.5, 0.96, True), (0.0, 0.94, False)]
    assert found[1]["figure"].endswith(LINKS)


def test_the_bar_of_gaps() -> None:
    figure = "p99 between tokens of 32 streams at 4096 while 131072 tokens are prefilled"
    for value, met in ((0.049, True), (0.051, False)):
        assert barred({"figure": figure, "value": value})["met"] is met
    assert barred(load("1", 0.9))["met"] is None
