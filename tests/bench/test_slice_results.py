"""Bars and comparisons of the slice's figures."""

from __future__ import annotations

from typing import Any

import pytest

from bench.slice_results import barred, compared

TP8 = "tp8 rank 0, fp8, fp8 KV: "


def row(figure: str, value: float, **more: Any) -> dict[str, Any]:
    return {"figure": figure, "value": value, "unit": "s", "links_modelled_s": 0.0, **more}


@pytest.mark.parametrize(
    ("figure", "value", "bar", "met"),
    [
        ("prefill of 32768 tokens in chunks of 16384", 0.54, 0.55, True),
        ("prefill of 131072 tokens in chunks of 32768", 5.1, 5.0, False),
        ("prefill of 131072 tokens in chunks of 32768, 25% of its blocks", 2.5, 2.6, True),
        ("prefill of 196608 tokens in chunks of 32768, 17% of its blocks by the paper rule", 3.5, 3.6, True),
        ("all graphs of 64 sequences with 0 or 1 drafts", 21.0, 20.0, False),
        ("decode of 16 at 4096", 0.0073, 0.0072, False),
        ("decode of 16 at 4096, 1 drafts", 0.1, None, None),
        ("prefill of 8192 tokens in chunks of 8192", 0.1, None, None),
    ],
)
def test_bars(figure: str, value: float, bar: float | None, met: bool | None) -> None:
    found = barred(row(TP8 + figure, value))
    assert (found["bar"], found["met"]) == (bar, met)


def test_a_share_of_the_floor_is_a_bar_too() -> None:
    figure = "dp8,ep8 rank 0, fp8, fp8 KV: decode of 16 at 32768"
    assert barred(row(figure, 0.04, of_floor=0.71))["met"] is True
    assert barred(row(figure, 0.04, of_floor=0.69))["met"] is False


def test_plans_are_compared_with_what_they_send() -> None:
    phases = {"norms": 0.05, "router": 0.01}
    prompt = "prefill of 32768 tokens in chunks of 32768"
    rows = [
        row(TP8 + prompt, 0.5, phases=phases) | {"links_modelled_s": 0.1},
        row("tp8,sp,fp8 rank 0, fp8, fp8 KV: " + prompt, 0.4, phases={"norms": 0.0, "router": 0.005})
        | {"links_modelled_s": 0.05},
        row(TP8 + "decode of 32 at 4096", 0.010, tokens_per_s=3200),
        row(TP8 + "decode of 32 at 4096, 1 drafts", 0.014, tokens_per_s=3840),
        row("tp8 rank 0, w4a8, fp8 KV: decode of 32 at 4096", 0.008),
    ]
    found = {made["figure"]: (made["value"], made["met"]) for made in compared({r["figure"]: r for r in rows})}
    name = "prefill of 32768 tokens, tp8,sp,fp8 against tp8: "
    links = "with transfers by the link model, none overlapped"
    assert found == {
        name + "computing is lower by": (20.0, None),
        name + "lower by, " + links: (25.0, True),
        name + links: (0.45, True),
        name + "norms and router": (0.0833333, True),
        "one draft of which 70 % count as right, batch 32 at 4096: tokens a second over none": (1.2, True),
        "W4A8 over fp8, batch 32 at 4096: tokens a second": (25.0, False),
    }


@pytest.mark.parametrize(
    ("ahead", "idle_s", "met"), [(3520.0, 2e-4, True), (3300.0, 5e-5, True), (3300.0, 2e-4, False)]
)
def test_a_step_ahead_wins_or_has_no_bubble_left(ahead: float, idle_s: float, met: bool) -> None:
    loop = TP8 + "scheduler's loop, batch 32, 1 drafts, "
    rows = [
        row(loop + "synchronous", 0.011, tokens_per_s=3200.0, idle_s=1e-3),
        row(loop + "a step ahead", 0.010, tokens_per_s=ahead, idle_s=idle_s),
    ]
    gain, idle = compared({r["figure"]: r for r in rows})
    assert gain["figure"] == "scheduler's loop, batch 32, 1 drafts: a step ahead over synchronous, tokens a second"
    assert gain["value"] == pytest.approx(100 * (ahead / 3200 - 1))
    assert gain["met"] is met
    assert (idle["value"], idle["bar"]) == (idle_s, None)


def test_steps_of_64_may_idle_for_150_microseconds() -> None:
    loop = TP8 + "scheduler's loop, batch 64, "
    rows = [row(loop + how, 0.01, tokens_per_s=6400.0, idle_s=1e-4) for how in ("synchronous", "a step ahead")]
    _, idle = compared({r["figure"]: r for r in rows})
    assert (idle["bar"], idle["met"]) == (150e-6, True)
