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
def _reaching(maxima_ptr, column_key, key, wide, TILES: tl.constexpr):
    """How many maxima, or of columns' maxima, reach a key."""
    reaching = (column_key >= key).to(tl.int32)
    if wide:
        reaching = tl.zeros((256,), tl.int32)
        for tile in range(TILES):
            reaching += (_keys(maxima_ptr, tile) >= key).to(tl.int32)
    return tl.sum(reaching, 0)


@triton.jit
def kth_bound(maxima_ptr, column_max, count, TILES: tl.constexpr):
    """A key that at least ``count`` tokens reach, and not many more."""
    key = order_key(column_max)
    wide = count > _COLUMNS
    bound = LOWEST
    reached = TILES * 256
    step = 1 << 30
    higher = 0
    while (step > 32768) & (reached > count + 14):
        there = _reaching(maxima_ptr, key, higher, wide, TILES)
        if there >= count:
            bound = higher
            reached = there
        # The sign first: from the lowest key or from 0 the bits below it go up.
        higher = bound + step
        step = step >> 1
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
