"""The scheduler over a slice, and the idle time that a timeline of its steps tells."""

from __future__ import annotations

import pytest
from katydid_engine.rank_slice.loop import idle_between_steps, measure_loop
from katydid_engine.rank_slice.phases import KernelSpan
from katydid_engine.rank_slice.steps import SliceSteps

from tests.engine.rank_slice.small import small_slice


def timeline(*spans: tuple[str, float, float]) -> list[KernelSpan]:
    return [KernelSpan(name, start, end - start) for name, start, end in spans]


def test_idle_time_is_what_stands_before_a_step_without_its_copies() -> None:
    found = idle_between_steps(
        timeline(
            ("_advance_kernel", 0, 2),
            ("gemm", 3, 10),  # a gap inside a step is none between steps
            ("Memcpy DtoH (Device -> Pinned)", 11, 13),
            ("Memcpy HtoD (Pinned -> Device)", 20, 21),
            ("_advance_kernel", 22, 24),
            ("gemm", 24, 30),
            ("_advance_kernel", 29, 31),  # it overlaps: nothing idles
        )
    )
    assert found == pytest.approx([(1 + 7 + 1) * 1e-6, 0.0])
    assert idle_between_steps([]) == []


@pytest.mark.parametrize("drafts", [0, 1])
def test_the_scheduler_steps_a_slice_both_ways(drafts: int) -> None:
    steps = SliceSteps(small_slice("tp2", mtp=True), 8192, drafts=1)
    steps.drafts = drafts
    rows = measure_loop(steps, 3, count=2)
    more = ", 1 drafts" if drafts else ""
    assert [row["figure"].split(": ")[1] for row in rows] == [
        f"scheduler's loop, batch 3{more}, {how}" for how in ("synchronous", "a step ahead")
    ]
    for row in rows:
        # A sequence yields a token a step at least, and what was drafted besides at most.
        assert 2.9 <= row["tokens_per_s"] * row["value"] <= 3 * (1 + drafts) + 0.1
        assert row["idle_s"] is None
