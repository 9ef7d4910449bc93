"""Which sequences a step of the distillation sees."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.quantize.distill import drawn


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 3))
def test_all_sequences_come_before_any_comes_again(count: int, each: int, seed: int) -> None:
    steps = list(itertools.islice(drawn(count, each, seed), 9))
    assert all(len(step) == each for step in steps)
    seen = torch.cat(steps).tolist()
    for whole in range(0, len(seen) - count + 1, count):
        assert sorted(seen[whole : whole + count]) == list(range(count))
    again = torch.cat(list(itertools.islice(drawn(count, each, seed), 9))).tolist()
    assert again == seen
