"""Finding the groups of 16 tokens that may hold what the filters keep, from the groups' maxima alone.

The maxima of a row, ``[TILES, 256]``, stay in memory (they fit the first-level cache) and a thread looks at a column of
them: the search for a bound is over one value a thread, the column's largest. That is as good: k different columns
reach the k-th largest of their maxima, and few tokens of a column that are among the k likeliest hide behind another.
"""

import triton
import triton.language as tl

from katydid_kernels.sample.row_values import largest, order_key

__all__ = ["column_maxima", "kth_bound", "list_groups", "mass_bound"]

LOWEST = tl.constexpr(-2147483648)
# More columns than this make a bound that too many tokens reach: then all maxima are searched.
_COLUMNS = tl.constexpr(96)


@triton.jit
def _keys(maxima_ptr, tile):
    return order_key(tl.load(maxima_ptr + tile * 256 + tl.arange(0, 256)))


@triton.jit
def column_maxima(maxima_ptr, TILES: tl.constexpr):
    """The largest of each column, ``[256]``."""
    best = tl.load(maxima_ptr + tl.arange(0, 256))
    for tile in tl.static_range(1, TILES):
        best = largest(best, tl.load(maxima_ptr + tile * 256 + tl.arange(0, 256)))
    return best


@triton.jit
def kth_bound(maxima_ptr, column_max, count, TILES: tl.constexpr):
    """A key that at least ``count`` tokens reach, and not many more."""
    bound = LOWEST
    unit = 1 << 30
    if count <= _COLUMNS:
        # Two bits at a time: how many columns reach each of three keys, in fields of one sum.
        key = order_key(column_max)
        reached = 256
        while (unit > 16384) & (reached > count + 14):
            first = bound + unit
            second = first + unit
            third = second + unit
            fields = (key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << 10)
            fields = tl.sum(fields + ((key >= third).to(tl.int32) << 20), 0)
            if (fields >> 20) >= count:
                bound = third
                reached = fields >> 20
            elif ((fields >> 10) & 1023) >= count:
                bound = second
                reached = (fields >> 10) & 1023
            elif (fields & 1023) >= count:
                bound = first
                reached = fields & 1023
            unit = unit >> 2
    else:
        higher = 0
        while unit > 16384:
            reaching = tl.zeros((256,), tl.int32)
            for tile in range(TILES):
                reaching += (_keys(maxima_ptr, tile) >= higher).to(tl.int32)
            if tl.sum(reaching, 0) >= count:
                bound = higher
            # The sign first: from the lowest key or from 0 the bits below it go up.
            higher = bound + unit
            unit = unit >> 1
    return bound


@triton.jit
def mass_bound(maxima_ptr, column_max, maximum, exponent, wanted, TILES: tl.constexpr):
    """A key such that the tokens that reach it have at least the mass wanted over the likeliest's; or the lowest."""
    key = order_key(column_max)
    mass = tl.exp2((column_max - maximum) * exponent)
    wide = tl.sum(mass, 0) < wanted
    bound = LOWEST
    step = 1 << 30
    higher = 0
    for _ in range(16):
        reaching = tl.where(key >= higher, mass, 0.0)
        if wide:
            reaching = tl.zeros((256,), tl.float32)
            for tile in range(TILES):
                group_max = tl.load(maxima_ptr + tile * 256 + tl.arange(0, 256))
                reaching += tl.where(order_key(group_max) >= higher, tl.exp2((group_max - maximum) * exponent), 0.0)
        if tl.sum(reaching, 0) >= wanted:
            bound = higher
        higher = bound + step
        step = step >> 1
    return bound


@triton.jit
def list_groups(maxima_ptr, bound, list_ptr, TILES: tl.constexpr):
    """Writes the groups whose maximum reaches the bound, column by column; returns how many."""
    count = tl.zeros((256,), tl.int32)
    for tile in tl.static_range(TILES):
        count += (_keys(maxima_ptr, tile) >= bound).to(tl.int32)
    place = tl.cumsum(count, 0) - count
    for tile in tl.static_range(TILES):
        chosen = _keys(maxima_ptr, tile) >= bound
        tl.store(list_ptr + place, tile * 256 + tl.arange(0, 256), mask=chosen)
        place += chosen.to(tl.int32)
    tl.debug_barrier()
    return tl.sum(count, 0)
