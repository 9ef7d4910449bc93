"""Plans in fixed memory: whatever chunk is told, each query is in one tile, and each block of a tile in one piece."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.fixed_prefill import FixedPrefill
from katydid_kernels import StemRule, block_sparse_prefill, prefill_attention, sparse_plan, stem_select
from katydid_kernels.stem_select.budget import kept_blocks

from tests.kernels.paged import FP8, make_pages, relative_error

CPU = torch.device("cpu")
LONGEST = 262_152


@st.composite
def chunks(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Of a graph's tokens how many are new, where they end, and how long their prompt is."""
    size = draw(st.sampled_from([64, 256, 512, 1536, 2048]))
    new = draw(st.integers(1, size))
    end = draw(st.integers(new if new == size else max(128, new), LONGEST))
    return size, new, end, draw(st.integers(end, LONGEST))


@given(
    chunks(), st.sampled_from([1, 2, 8, 64]), st.sampled_from([None, StemRule(0.25, tail=4), StemRule(rule="released")])
)
def test_every_query_and_every_block_is_planned_once(
    told: tuple[int, int, int, int], heads: int, rule: StemRule | None
) -> None:
    size, new, end, prompt = told
    fixed = FixedPrefill(rule, size, LONGEST, heads, CPU)
    fixed.fill(size, size, size)  # what stood there before is of no account
    fixed.fill(new, end, None if rule is None else prompt)
    plan = fixed.plan
    tiles = {tile: record for *record, tile, _ in plan.in_order.tolist()}
    borders = sorted((first, last) for _, first, last, *_ in tiles.values())
    assert [first for first, _ in borders] == [0, *(last for _, last in borders[:-1])]
    assert borders[-1][1] == size
    kept = None if rule is None else kept_blocks(rule, prompt)
    for _, first, last, position, length, count in tiles.values():
        block = position // 128
        assert (position + last - first - 1) // 128 == block, "a tile lies within one block"
        assert length == end
        if first < new:
            assert (position, last <= new) == (end - new + first, True)
            assert count == (block + 1 if kept is None else kept[block])
        else:
            assert count == 1
    pieces, results = defaultdict(list), {}
    for _, first, last, position, _, count, tile, begin, slot in plan.pieces.tolist():
        assert tiles[tile][1:4] == [first, last, position]
        if slot != plan.partials - 1:
            pieces[tile].append((begin, begin + count))
            results[slot] = (first, last)
    for tile, (*_, count) in tiles.items():
        parts = sorted(pieces[tile])
        assert parts[0][0] == 0
        assert parts[-1][1] == count
        assert all(before[1] == after[0] for before, after in pairwise(parts))
    summed = {
        slot: (first, last) for start, parts, first, last in plan.cuts.tolist() for slot in range(start, start + parts)
    }
    results.pop(-1, None)
    assert summed == results, "pieces of a tile that was cut are summed, whole ones are not"


def test_all_blocks_newest_first() -> None:
    fixed = FixedPrefill(None, 256, 1000, 2, CPU)
    fixed.fill(200, 500, None)
    lists = fixed.all_blocks()
    assert lists.shape == (fixed.plan.tiles, 2, 8)
    for tile, (_, _, _, position, _, count, _, row) in enumerate(fixed.plan.in_order.tolist()):
        assert row == -1
        assert lists[tile, 1, :count].tolist() == list(range(position // 128, position // 128 - count, -1))


def test_more_than_there_is_room_for_is_refused() -> None:
    fixed = FixedPrefill(None, 256, 1000, 2, CPU)
    with pytest.raises(ValueError, match="rows of a sparse plan: there is room for"):
        fixed.fill(1500, 2000, None)
    with pytest.raises(ValueError, match="a context of 127 tokens: expected at least 128"):
        fixed.fill(100, 127, None)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(FP8, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize(("size", "new", "end"), [(512, 512, 3000), (512, 300, 4000), (256, 1, 2000), (256, 200, 200)])
def test_attention_as_by_the_usual_plans(size: int, new: int, end: int, dtype: torch.dtype) -> None:
    """Sparse and dense; what stands behind the chunk in the graph's rows is of no account."""
    device = "cuda" if torch.cuda.is_available() and dtype is FP8 else "cpu"
    heads, dim = 8, 128 if device == "cuda" else 16
    pages = make_pages([end], 1, dim, dtype, device)
    # A graph's table is as long as tables get.
    table = torch.zeros(1, 80, dtype=torch.int32, device=device)
    table[:, : pages.table.shape[1]] = pages.table
    pages = pages._replace(table=table)
    q = torch.randn(size, heads, dim, generator=torch.Generator().manual_seed(1)).to(device).to(dtype)
    scaled = {"q_scale": torch.rand(size, heads, device=device) + 0.5} if dtype is FP8 else {}
    if dtype is FP8:
        scaled |= {"k_scale": torch.ones(1, device=device), "v_scale": torch.ones(1, device=device)}
    own = {name: scale[:new] if name == "q_scale" else scale for name, scale in scaled.items()}
    rule, prompt = StemRule(0.3, sink=1, window=1, tail=2), end + 500
    usual = sparse_plan(rule, [new], [end], [prompt], device, heads=heads)
    blocks = stem_select(q[:new], *pages[:4], usual, **own)
    expected = block_sparse_prefill(q[:new], *pages[:4], usual, blocks, **own)
    fixed = FixedPrefill(rule, size, 5000, heads, torch.device(device))
    fixed.fill(new, end, prompt)
    chosen = stem_select(q, *pages[:4], fixed.plan, **scaled)
    for tile, record in enumerate(usual.in_order.tolist()):
        assert torch.equal(chosen[tile, :, : record[5]], blocks[tile, :, : record[5]])
    found = block_sparse_prefill(q, *pages[:4], fixed.plan, chosen, **scaled)
    torch.testing.assert_close(found[:new], expected, atol=1e-2 if dtype is FP8 else 1e-6, rtol=1e-2)
    whole = FixedPrefill(None, size, 5000, heads, torch.device(device))
    whole.fill(new, end, None)
    cu_q_lens = torch.tensor([0, new], dtype=torch.int32, device=device)
    dense, _ = prefill_attention(q[:new], *pages[:4], cu_q_lens, **own)
    all_of_it = block_sparse_prefill(q, *pages[:4], whole.plan, whole.all_blocks(), **scaled)
    assert relative_error(all_of_it[:new], dense) < (3e-2 if dtype is FP8 else 2e-6)
    assert not all_of_it.isnan().any(), "rows that are over go on to experts"
