"""The decode planner: every tile exactly once, no CTA overloaded, and the GPU form equal to its plain-Python twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from katydid_kernels.decode_plan import (
    DEEP,
    FAN,
    MIN_TILES,
    PIECE_COST,
    TILE,
    Piece,
    decode_plan,
    decode_plan_reference,
    decode_plan_static,
)

lengths = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 4096]), st.integers(0, 3000), st.integers(0, 262144))
batches = st.lists(lengths, min_size=1, max_size=40)
shapes = st.tuples(
    batches, st.sampled_from([1, 2, 8]), st.sampled_from([1, 5, 132, 264]), st.sampled_from([None, 100, 5000])
)


def tiles_of(length: int, q_len: int, window: int | None) -> tuple[int, int]:
    end = -(-length // TILE)
    oldest = max(length - q_len - window + 1, 0) if window else 0
    return min(oldest // TILE, end), end


@given(shapes, st.integers(1, 8))
@example(([4096] * 64, 1, 264, None), 1)
@example(([262144] + [64] * 15, 1, 132, None), 1)
@settings(max_examples=150, deadline=None)
def test_every_visible_tile_is_dealt_exactly_once(shape, q_len):
    lens, kv_heads, ctas, window = shape
    plan = decode_plan_reference(lens, kv_heads, ctas=ctas, q_len=q_len, window=window)
    dealt: dict[tuple[int, int], list[Piece]] = {}
    for piece in (piece for pieces in plan for piece in pieces):
        dealt.setdefault((piece.row, piece.head), []).append(piece)
    assert set(dealt) == {(row, head) for row in range(len(lens)) for head in range(kv_heads)}
    for (row, _), pieces in dealt.items():
        first, end = tiles_of(lens[row], q_len, window)
        assert [p.part for p in pieces] == list(range(len(pieces)))
        assert {p.parts for p in pieces} == {len(pieces)}
        assert [t for p in pieces for t in range(p.tile_begin, p.tile_end)] == list(range(first, end))


@given(shapes)
@settings(max_examples=150, deadline=None)
def test_no_cta_carries_more_than_the_ideal_and_one_piece(shape):
    lens, kv_heads, ctas, window = shape
    plan = decode_plan_reference(lens, kv_heads, ctas=ctas, window=window)
    loads = [sum(max(p.tile_end - p.tile_begin, 1) + PIECE_COST for p in pieces) for pieces in plan]
    tiles = sum(max(end - first, 1) for first, end in (tiles_of(n, 1, window) for n in lens)) * kv_heads
    ideal = max(-(-(tiles + PIECE_COST * len(lens) * kv_heads) // ctas), MIN_TILES + PIECE_COST)
    assert max(loads) <= ideal + PIECE_COST + DEEP


def test_an_item_of_many_pieces_gets_shorter_ones():
    plan = decode_plan_reference([65536] + [4096] * 31, 1, ctas=264)
    pieces = [piece for pieces in plan for piece in pieces]
    long = [p.tile_end - p.tile_begin for p in pieces if p.row == 0]
    short = [p.tile_end - p.tile_begin for p in pieces if p.row == 1]
    assert len(long) > FAN >= len(short)
    assert max(long) < min(short)
    assert max(long) - min(long) <= 1


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_a_cta_has_at_most_two_partial_pieces(shape):
    lens, kv_heads, ctas, window = shape
    for pieces in decode_plan_reference(lens, kv_heads, ctas=ctas, window=window):
        partial = [p for p in pieces if p.parts > 1]
        assert len(partial) <= 2
        assert [p.part == 0 for p in partial] in ([], [True], [False], [False, True])


@pytest.mark.parametrize(
    ("lens", "kv_heads", "ctas", "q_len", "window"),
    [
        ([4096] * 16, 1, 66, 1, None),
        ([131072] + [4096] * 7, 1, 40, 1, None),
        ([16384] + [64] * 15, 1, 40, 4, None),
        ([0, 1, 63, 64, 65, 8191], 8, 60, 2, None),
        ([0, 1, 63, 64, 65, 8191], 8, 7, 2, None),
        ([100, 5000, 700, 60000], 2, 5, 3, 1000),
        ([262144], 1, 20, 1, 4096),
        ([300, 0, 2000, 17, 900], 3, 11, 1, None),
    ],
)
def test_the_device_planner_equals_its_twin(lens, kv_heads, ctas, q_len, window):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = torch.arange(len(lens) * 4096, dtype=torch.int32, device=device).reshape(len(lens), 4096)
    plan = decode_plan(
        torch.tensor(lens, dtype=torch.int32, device=device), kv_heads, ctas=ctas, q_len=q_len, window=window,
        block_table=table,
    )  # fmt: skip
    expected = decode_plan_reference(lens, kv_heads, ctas=ctas, q_len=q_len, window=window)
    for record, pieces in zip(plan.tolist(), expected, strict=True):
        if pieces:
            piece = pieces[0]
            assert Piece(*record[:6]) == piece
            assert record[8] == lens[piece.row]
            pages = [piece.row * 4096 + tile for tile in range(piece.tile_begin, piece.tile_end)]
            assert record[9:13] == (pages + [-1] * 4)[:4]
            assert (record[6] > PIECE_COST) == (len(pieces) > 1) or pieces[-1].row == len(lens) - 1
        else:
            assert record[0] == len(lens)


def test_a_batch_over_the_limit_is_refused():
    with pytest.raises(ValueError, match="context_lens must have at most 4096 rows, got 4097"):
        decode_plan(torch.zeros(4097, dtype=torch.int32), 1, ctas=1)


def test_the_static_plan_cuts_every_item_alike():
    plan = decode_plan_static(torch.tensor([640, 65, 0], dtype=torch.int32), 2, 4)
    pieces = [Piece(*record[:6]) for record in plan.tolist() if record[0] < 3]
    for head in range(2):
        assert [p for p in pieces if p.head == head] == [
            Piece(0, head, 0, 2, 0, 4),
            Piece(0, head, 2, 5, 1, 4),
            Piece(0, head, 5, 7, 2, 4),
            Piece(0, head, 7, 10, 3, 4),
            Piece(1, head, 0, 1, 0, 2),
            Piece(1, head, 1, 2, 1, 2),
            Piece(2, head, 0, 0, 0, 1),
        ]
    assert [record[4] for record in plan.tolist()] == [0, 1, 2, 3] * 6
