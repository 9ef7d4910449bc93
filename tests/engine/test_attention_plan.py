"""Attention's part of a step: who is a prefill chunk, and one plan of each kind for all layers."""

from __future__ import annotations

import pytest
import torch
from katydid_engine.attention_plan import AttentionPlanner
from katydid_engine.forward_batch import ForwardBatch, TokenRun

RUNS = [
    TokenRun([1], 70, [0, 1]),
    TokenRun([2], 3, [2]),
    TokenRun([3, 4, 5], 0, [3]),
    TokenRun([6] * 70, 64, [4, 5, 6]),
]


def test_prefill_chunks_begin_behind_the_decodes() -> None:
    planner = AttentionPlanner(8, 2, 64, torch.device("cpu"))
    planned = planner.planned(ForwardBatch.pack(RUNS, num_decodes=2))
    assert planned.attention is not None
    assert planned.attention.prefill_cu_q_lens.tolist() == [0, 3, 73]
    assert planner.planned(planned) is planned


def test_a_single_decode_goes_token_by_token() -> None:
    """To what each may see, beside a prompt too; two decodes go as they are."""
    planner = AttentionPlanner(8, 2, 64, torch.device("cpu"))
    drafted, prompt = [TokenRun([1, 0, 0], 70, [0, 1]), TokenRun([1, 0, 0], 3, [2])], TokenRun([3, 4], 0, [3])
    one = planner.planned(ForwardBatch.pack(drafted[:1], num_decodes=1, decode_q_len=3)).attention
    two = planner.planned(ForwardBatch.pack(drafted, num_decodes=2, decode_q_len=3)).attention
    beside = planner.planned(ForwardBatch.pack([drafted[0], prompt], num_decodes=1, decode_q_len=3)).attention
    assert one is not None
    assert two is not None
    assert beside is not None
    assert (one.decode_lens.tolist(), one.decode_q_len) == ([71, 72, 73], 1)
    assert one.decode_table.tolist() == [[0, 1]] * 3
    assert (two.decode_lens.tolist(), two.decode_q_len) == ([73, 6], 3)
    assert beside.decode_lens.tolist() == [71, 72, 73]


@pytest.mark.gpu
def test_layers_share_one_plan_of_each_kind() -> None:
    device = torch.device("cuda")
    planner = AttentionPlanner(8, 2, 64, device)
    batches = [ForwardBatch.pack(RUNS, num_decodes=2, device=device), ForwardBatch.pack(RUNS[:1], device=device)]
    both, prefill = (planner.planned(batch).attention for batch in batches)
    assert both is not None
    assert prefill is not None
    assert both.decode is not None
    assert both.prefill is not None
    assert prefill.decode is None
    assert both.scratch is prefill.scratch
