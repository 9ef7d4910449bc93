"""The advice against brute force over all prefixes, and what it does with measurements that grow old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_cache import Tier, TierRun
from katydid_engine.fetch_advice import FetchAdvice

RUNS = st.lists(
    st.builds(TierRun, st.sampled_from(Tier), st.integers(1, 40), st.floats(0, 0.5, allow_nan=False)), max_size=6
)


@given(RUNS, st.floats(100, 100_000), st.lists(st.tuples(st.sampled_from(Tier), st.integers(1, 40), st.floats(0, 1))))
def test_no_other_prefix_of_runs_would_be_faster(
    runs: list[TierRun], rate: float, reads: list[tuple[Tier, int, float]]
) -> None:
    advice = FetchAdvice(64)
    for tier, blocks, elapsed_s in reads:
        advice.note(tier, blocks, elapsed_s, 0.0)
    given_advice = advice.advise(runs, rate, 0.0)
    total = sum(run.blocks for run in runs)
    alone = [advice.advise([run], 0.0, 0.0).fetch_s for run in runs]
    times = {}
    for count in range(len(runs) + 1):
        blocks = sum(run.blocks for run in runs[:count])
        times[blocks] = sum(alone[:count]) + (total - blocks) * 64 / rate
    assert given_advice.blocks in times
    assert times[given_advice.blocks] == pytest.approx(min(times.values()))
    assert given_advice.found_s == pytest.approx(sum(alone))


def test_a_slow_disk_is_left_alone_and_memory_before_it_is_not() -> None:
    advice = FetchAdvice(64)
    runs = [TierRun(Tier.MEMORY, 10, 0.0), TierRun(Tier.DISK, 10, 2.0)]
    assert advice.advise(runs, 10_000, 0.0).blocks == 10  # ten blocks take 0.064 s to compute
    assert advice.advise(runs, 100, 0.0).blocks == 20  # and here 6.4 s
    assert advice.advise([runs[1], runs[0]], 10_000, 0.0).blocks == 0, "what lies behind can't be read alone"
    assert advice.advise(runs, 0.0, 0.0).blocks == 20, "without a measured speed everything is fetched"


def test_a_link_that_was_slow_is_tried_again() -> None:
    advice, runs = FetchAdvice(64), [TierRun(Tier.MEMORY, 32, 0.0)]
    assert advice.advise(runs, 10_000, 0.0).blocks == 32
    advice.note(Tier.MEMORY, 32, 1.0, 0.0)
    assert advice.advise(runs, 10_000, 1.0).blocks == 0  # 32 blocks take 0.2 s to compute
    assert advice.advise(runs, 10_000, 120.0).blocks == 32
    advice.note(Tier.MEMORY, 32, 0.01, 120.0)
    for _ in range(20):
        advice.note(Tier.MEMORY, 32, 0.01, 121.0)
    assert advice.advise(runs, 10_000, 121.0).blocks == 32


def test_sizes_are_measured_apart() -> None:
    advice = FetchAdvice(64)
    advice.note(Tier.MEMORY, 1, 0.05, 0.0)
    assert advice.advise([TierRun(Tier.MEMORY, 1, 0.0)], 10_000, 0.0).blocks == 0
    assert advice.advise([TierRun(Tier.MEMORY, 32, 0.0)], 10_000, 0.0).blocks == 32
    advice.note(Tier.MEMORY, 0, 5.0, 0.0)
