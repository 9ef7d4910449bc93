"""Packing of sequences into one batch: positions, slots and pages against plain sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.kv_cache import KvCache


def test_pack() -> None:
    runs = [TokenRun([9], 64, [5, 2]), TokenRun([1, 2, 3], 62, [7, 1, 8])]
    batch = ForwardBatch.pack(runs, num_decodes=1)
    assert batch.token_ids.tolist() == [9, 1, 2, 3]
    assert batch.positions.tolist() == [64, 62, 63, 64]
    assert batch.slot_mapping.tolist() == [2 * 64, 7 * 64 + 62, 7 * 64 + 63, 1 * 64]
    assert batch.cu_q_lens.tolist() == [0, 1, 4]
    assert batch.context_lens.tolist() == [65, 65]
    assert batch.block_table.tolist() == [[5, 2], [7, 1]]
    assert (batch.num_tokens, batch.num_seqs, batch.num_decode_tokens) == (4, 2, 1)
    assert (batch.max_q_len, batch.max_context_len) == (3, 65)
    tensors = (
        batch.token_ids,
        batch.positions,
        batch.cu_q_lens,
        batch.context_lens,
        batch.block_table,
        batch.slot_mapping,
    )
    assert {tensor.dtype for tensor in tensors} == {torch.int32}


@given(st.lists(st.tuples(st.integers(1, 130), st.integers(0, 200)), min_size=1, max_size=6))
def test_slots_follow_positions(shapes: list[tuple[int, int]]) -> None:
    runs, free = [], 0
    for length, start in shapes:
        count = -(-(start + length) // 64)
        runs.append(TokenRun([0] * length, start, list(range(free, free + count))))
        free += count
    batch = ForwardBatch.pack(runs)
    assert len(set(batch.slot_mapping.tolist())) == batch.num_tokens  # no two tokens in one place
    for index, (length, start) in enumerate(shapes):
        rows = slice(int(batch.cu_q_lens[index]), int(batch.cu_q_lens[index + 1]))
        positions = batch.positions[rows]
        assert positions.tolist() == list(range(start, start + length))
        pages = batch.block_table[index][(positions // 64).long()]
        assert torch.equal(batch.slot_mapping[rows], pages * 64 + positions % 64)


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        ([], {}, "runs is empty"),
        ([TokenRun([], 0, [0])], {}, r"runs\[0\]\.token_ids is empty"),
        ([TokenRun([1, 2], 63, [0])], {}, r"runs\[0\] ends at token 65 but has 1 pages of 64"),
        ([TokenRun([1, 2], 0, [0])], {"num_decodes": 1}, r"runs\[0\] is a decode of 2 tokens, expected decode_q_len=1"),
    ],
)
def test_wrong_runs(runs: list[TokenRun], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ForwardBatch.pack(runs, **options)


def test_kv_cache() -> None:
    cache = KvCache.allocate(num_layers=3, num_pages=5, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16, device="cpu")
    assert (cache.num_layers, cache.num_pages) == (3, 5)
    assert cache.k_pages[0].shape == (5, 2, 64, 16)
    assert cache.v_pages[2].shape == (5, 2, 16, 64)
    assert cache.bytes_per_page == 3 * 2 * (2 * 64 * 16) * 2
    assert sum(page.abs().sum() for page in cache.k_pages + cache.v_pages) == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 7), st.integers(1, 9))
def test_parts_of_a_batch_are_the_batch(lengths: list[int], decodes: int, parts: int) -> None:
    decodes = min(decodes, len(lengths))
    lengths[:decodes] = [1] * decodes
    runs = [TokenRun([10 * index] * length, 3 * index, [index]) for index, length in enumerate(lengths)]
    whole = ForwardBatch.pack(runs, num_decodes=decodes)
    found = whole.split(parts)
    assert len(found) == min(parts, len(runs))
    for name in ("token_ids", "positions", "context_lens", "block_table", "slot_mapping"):
        assert torch.equal(torch.cat([getattr(part, name) for part in found]), getattr(whole, name))
    assert sum(part.num_decodes for part in found) == decodes
    start = 0
    for part in found:
        alone = ForwardBatch.pack(runs[start : start + part.num_seqs], num_decodes=part.num_decodes)
        assert part.cu_q_lens.tolist() == alone.cu_q_lens.tolist()
        assert (part.num_decodes, part.max_q_len) == (alone.num_decodes, alone.max_q_len)
        start += part.num_seqs


def test_a_batch_has_one_part_at_least() -> None:
    with pytest.raises(ValueError, match="parts=0"):
        ForwardBatch.pack([TokenRun([1], 0, [0])]).split(0)
