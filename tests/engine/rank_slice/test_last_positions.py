"""Decodes up to the model's last position say what a prompt of the same tokens does."""

from __future__ import annotations

import pytest
from katydid_engine.rank_slice.last_positions import measure_last_positions
from katydid_engine.rank_slice.steps import SliceSteps
from katydid_engine.sparse_prefill import SparsePrefill

from tests.engine.rank_slice.small import CONFIG, small_slice


@pytest.mark.parametrize("sparse", [False, True])
def test_the_last_position_is_computed_by_decodes_as_in_a_prompt(sparse: bool) -> None:
    steps = SliceSteps(small_slice("tp2", dtype="bf16"), CONFIG.max_positions)
    steps.slice.model.use_sparse_prefill(SparsePrefill(min_tokens=1))
    row = measure_last_positions(steps, 512, sparse=sparse)
    assert row["last_position"] == CONFIG.max_positions - 1
    assert (row["places"], row["same"]) == (33, 33)
    assert row["less_likely_at_most"] == 0
