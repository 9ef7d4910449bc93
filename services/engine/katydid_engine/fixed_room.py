"""Room that rows take on their way to experts in the form of the exchange that a CUDA graph can hold."""

from __future__ import annotations

__all__ = ["MOST_FIXED_ROWS", "fixed_room"]

# With more rows on a rank, sending room that stays empty takes longer than to tell and read how many go where.
MOST_FIXED_ROWS = 512


def fixed_room(most: int) -> int | None:
    """Rows that each rank sends to each other where none has more than ``most``: a power of two or half as many again,
    so that it is the same for many numbers. None for so many that they are told instead."""
    if most > MOST_FIXED_ROWS:
        return None
    whole = 1 << max(0, most - 1).bit_length()
    return 3 * whole // 4 if 2 < most <= 3 * whole // 4 else whole
