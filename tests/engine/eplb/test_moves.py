"""Moves between placements of experts, carried out on plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.eplb.balance import place_experts
from katydid_engine.eplb.moves import Move, keep_in_place, moves_between

EXPERTS, SLOTS, RANKS = 6, 12, 3
placements = st.lists(st.integers(0, 50), min_size=EXPERTS, max_size=EXPERTS).map(
    lambda loads: place_experts(np.array(loads, dtype=float), SLOTS, RANKS).tolist()
)


@given(placements, placements)
def test_the_moves_lead_to_the_placement(held: list[int], wanted: list[int]) -> None:
    placed = keep_in_place(held, wanted, RANKS)
    each = SLOTS // RANKS
    for rank in range(RANKS):
        own = slice(rank * each, (rank + 1) * each)
        assert sorted(placed[own]) == sorted(wanted[own])
    moved = list(held)
    for move in moves_between(held, placed, RANKS):
        assert held[move.target] != placed[move.target]
        moved[move.target] = held[move.source]
    assert moved == placed


@given(placements)
def test_nothing_moves_to_the_same_placement(held: list[int]) -> None:
    assert keep_in_place(held, sorted(held[:4]) + held[4:], RANKS) == held
    assert moves_between(held, held, RANKS) == []


def test_an_expert_on_the_same_rank_is_taken_from_there_and_others_take_turns() -> None:
    held = [0, 1, 2, 0, 1, 3]  # ranks of three slots
    assert moves_between(held, [0, 1, 0, 0, 1, 3], 2) == [Move(2, 0)]
    assert moves_between([0, 1, 0, 2, 3, 4], [0, 1, 0, 0, 0, 4], 2) == [Move(3, 0), Move(4, 2)]
    assert moves_between([1, 0, 2, 0, 1, 3], [1, 0, 2, 0, 1, 0], 2) == [Move(5, 3)], "the first holder is elsewhere"
    assert moves_between([0, 1, 0, 2, 0, 3, 4, 5], [0, 1, 0, 2, 0, 3, 0, 0], 4) == [Move(6, 0), Move(7, 2)]
    with pytest.raises(ValueError, match="expert 9 lies in no slot"):
        moves_between(held, [9, 1, 2, 0, 1, 3], 2)
