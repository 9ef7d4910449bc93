"""Plans in fixed memory: whatever chunk is told, each query is in one tile, and each block of a tile in one piece."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.fixed_prefill import FixedPrefill
from katydid_kernels import StemRule
from katydid_kernels.stem_select.budget import kept_blocks

CPU = torch.device("cpu")
LONGEST = 262_152


@st.composite
def chunks(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Of a graph's tokens how many are new, where they end, and how long their prompt is."""
    size = draw(st.sampled_from([64, 256, 512, 1536, 2048]))
    new = draw(st.integers(1, size))
    end = draw(st.integers(new, LONGEST))
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
