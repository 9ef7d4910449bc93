"""Finding the groups of 16 tokens that may hold what the filters keep, from the groups' maxima alone.

The maxima of a row are read once and stay in registers, a column of them in a thread: the search for a bound is over
one value a thread, the column's largest. That is as good: k different columns reach the k-th largest of their maxima,
and few tokens of a column that are among the k likeliest hide behind another.
"""

import triton
import triton.language as tl

from katydid_kernels.sample.row_values import key_value, largest, order_key

__all__ = ["group_maxima", "kth_bound", "list_groups", "mass_bound"]

LOWEST = tl.constexpr(-2147483648)
# More columns than this make a bound that too many tokens reach: then all maxima are searched.
_COLUMNS = tl.constexpr(96)


@triton.jit
def group_maxima(maxima_ptr, TILES: tl.constexpr, BLOCK_TILES: tl.constexpr):
    """All of a row, ``[256, BLOCK_TILES]``, -inf behind the last, and the largest of each column, ``[256]``.

    Columns first: the compiler deals threads along the first dimension of addresses that it knows nothing about.
    """
    tile = tl.arange(0, BLOCK_TILES)[None, :]
    place = tile * 256 + tl.arange(0, 256)[:, None]
    maxima = tl.load(maxima_ptr + place, mask=tile < TILES, other=float("-inf"))
    return maxima, tl.reduce(maxima, 1, largest)


@triton.jit
def kth_bound(maxima, column_max, maximum, count):
    """A key that at least ``count`` tokens reach, and not many more."""
    bound = LOWEST
    if count <= _COLUMNS:
        # From the smallest column, which all reach. Two bits at a time: how many columns reach each of three keys, in
        # fields of one sum.
        bound = order_key(tl.min(column_max, 0))
        quarter = (order_key(maximum) >> 2) - (bound >> 2) + 1
        reached = 256
        while (quarter > 16384) & (reached > count + 14):
            first = bound + quarter
            second = first + quarter
            third = second + quarter
            fields = (column_max >= key_value(first)).to(tl.int32)
            fields += (column_max >= key_value(second)).to(tl.int32) << 10
            fields = tl.sum(fields + ((column_max >= key_value(third)).to(tl.int32) << 20), 0)
            if (fields >> 20) >= count:
                bound = third
                reached = fields >> 20
            elif ((fields >> 10) & 1023) >= count:
                bound = second
                reached = (fields >> 10) & 1023
            elif (fields & 1023) >= count:
                bound = first
                reached = fields & 1023
            quarter = (quarter + 3) >> 2
    else:
        unit = 1 << 30
        higher = 0
        while unit > 16384:
            if tl.sum(tl.sum((maxima >= key_value(higher)).to(tl.int32), 1), 0) >= count:
                bound = higher
            # The sign first: from the lowest key or from 0 the bits below it go up.
            higher = bound + unit
            unit = unit >> 1
    return bound


@triton.jit
def mass_bound(maxima, column_max, maximum, exponent, wanted):
    """A key such that the tokens that reach it have at least the mass wanted over the likeliest's; or the lowest."""
    mass = tl.exp2((column_max - maximum) * exponent)
    bound = LOWEST
    step = 1 << 30
    higher = 0
    if tl.sum(mass, 0) >= wanted:
        for _ in range(16):
            if tl.sum(tl.where(column_max >= key_value(higher), mass, 0.0), 0) >= wanted:
                bound = higher
            higher = bound + step
            step = step >> 1
    else:
        masses = tl.exp2((maxima - maximum) * exponent)
        for _ in range(16):
            if tl.sum(tl.sum(tl.where(maxima >= key_value(higher), masses, 0.0), 1), 0) >= wanted:
                bound = higher
            higher = bound + step
            step = step >> 1
    return bound


@triton.jit
def list_groups(maxima, bound, list_ptr, TILES: tl.constexpr, BLOCK_TILES: tl.constexpr):
    """Writes the groups whose maximum reaches the bound, at least that of -inf, column by column; returns how many."""
    tile = tl.arange(0, BLOCK_TILES)[None, :]
    chosen = ((maxima >= key_value(bound)) & (tile < TILES)).to(tl.int32)
    count = tl.sum(chosen, 1)
    place = (tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(chosen, 1) - chosen
    tl.store(list_ptr + place, tile * 256 + tl.arange(0, 256)[:, None], mask=chosen != 0)
    tl.debug_barrier()
    return tl.sum(count, 0)
