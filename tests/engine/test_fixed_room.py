"""Room on the way to experts: enough for all, and the same for many numbers."""

from __future__ import annotations

from katydid_engine.decode_steps import row_buckets
from katydid_engine.fixed_room import MOST_FIXED_ROWS, fixed_room


def test_there_is_room_for_all_rows_and_half_as_much_again_at_most() -> None:
    for most in range(1, MOST_FIXED_ROWS + 1):
        room = fixed_room(most)
        assert room is not None
        assert most <= room < most + max(1, most / 2)
    assert len({fixed_room(most) for most in range(1, MOST_FIXED_ROWS + 1)}) == 18
    assert fixed_room(MOST_FIXED_ROWS + 1) is None
    assert [fixed_room(rows) for rows in row_buckets(64)] == row_buckets(64), (
        "a graph's rows take no more than they are"
    )
