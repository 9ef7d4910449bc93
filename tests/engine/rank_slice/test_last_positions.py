"""Decodes up to the model's last position say what a prompt of the same tokens does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from katydid_engine.parallel import ParallelPlan
from katydid_engine.rank_slice import last_positions
from katydid_engine.rank_slice.build import SliceOptions, build_slice
from katydid_engine.rank_slice.last_positions import measure_last_positions
from katydid_engine.rank_slice.steps import SliceSteps
from katydid_engine.sparse_prefill import SparsePrefill

from tests.engine.rank_slice.small import CONFIG, HY3, small_slice


@pytest.mark.parametrize("sparse", [False, True])
def test_the_last_position_is_computed_by_decodes_as_in_a_prompt(sparse: bool) -> None:
    steps = SliceSteps(small_slice("tp2", dtype="bf16"), CONFIG.max_positions)
    steps.slice.model.use_sparse_prefill(SparsePrefill(min_tokens=1))
    row = measure_last_positions(steps, 512, sparse=sparse)
    assert row["last_position"] == CONFIG.max_positions - 1
    assert (row["places"], row["same"]) == (33, 33)
    assert row["less_likely_at_most"] == 0


def test_of_262144_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host each pass over so many takes a third of a second: one layer of one head, and few decodes."""
    monkeypatch.setattr(last_positions, "_DECODES", 2)
    monkeypatch.setattr(last_positions, "_REPEATS", 1)
    config = replace(
        CONFIG, num_layers=1, sparse_layers=(True,), num_heads=1, num_kv_heads=1, max_positions=HY3.max_positions
    )
    steps = SliceSteps(
        build_slice(SliceOptions(config, ParallelPlan.parse("single"), torch.device("cpu"), dtype="bf16", kv="bf16")),
        config.max_positions,
    )
    row = measure_last_positions(steps, 64)
    assert row["last_position"] == 262_143
    assert (row["places"], row["same"]) == (3, 3)
    assert row["less_likely_at_most"] == 0
    nearer = measure_last_positions(steps, 64, most=8192)
    assert (nearer["last_position"], nearer["same"]) == (8191, 3)
