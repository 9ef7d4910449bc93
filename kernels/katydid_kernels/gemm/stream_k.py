"""Equal shares of work for every CTA: a stream-K decomposition (Osama et al., 2023) of tiles over their stages of K.

The tiles stand on one line, each as long as its stages, and the line is cut into equal intervals, one a CTA. A tile cut
in two or more is summed by whichever CTA finishes it last, from fp32 partial sums, in the order of K: the result is the
same every time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["interval_of", "next_stage", "stages_within", "sum_parts", "tiles_of"]


@gluon.jit
def interval_of(steps, smallest):
    """Begin and end of this CTA's interval of `steps` stages, and the length of all intervals, `smallest` or more."""
    share = gl.maximum(gl.cdiv(steps, gl.num_programs(0)), smallest)
    begin = gl.minimum(gl.program_id(0) * share, steps)
    return begin, gl.minimum(begin + share, steps), share


@gluon.jit
def tiles_of(interval, tiles_k):
    """First and end of the tiles an interval touches, each `tiles_k` stages long."""
    begin, end, _ = interval
    first = begin // tiles_k
    return first, gl.where(begin < end, (end - 1) // tiles_k + 1, first)


@gluon.jit
def stages_within(tile, interval, tiles_k):
    """First and end of the tile's stages that belong to the interval."""
    begin, end, _ = interval
    return gl.maximum(begin - tile * tiles_k, 0), gl.minimum(end - tile * tiles_k, tiles_k)


@gluon.jit
def next_stage(tile, k, tiles_k):
    """Tile and stage of K of the stage after this one: a producer has no time to divide for each."""
    k += 1
    over = k == tiles_k
    return gl.where(over, tile + 1, tile), gl.where(over, 0, k)


@gluon.jit
def sum_parts(WHO: gl.constexpr, WGS: gl.constexpr, acc, tile, first_k, interval, tiles_k, partials):
    """Leave this CTA's part of a cut tile; whoever is last gets the sum of all parts, and True.

    partials: fp32 ``[2 * CTAs, WGS, *acc.shape]``, and int32 counters, zero, one a warpgroup's tile.
    """
    partial_ptr, counters_ptr = partials
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    # Parts read at once, as the registers allow.
    AT_ONCE: gl.constexpr = 8 if TOKENS == 8 else 2 if TOKENS == 64 else 4
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None] * TOKENS
    lane += gl.arange(0, TOKENS, gl.SliceLayout(0, layout))[None, :]
    # A CTA has two places: 1 for a tile it begins, 0 for one it takes up.
    place = gl.program_id(0) * 2 + gl.where(first_k == 0, 1, 0)
    gl.store(partial_ptr + (place * WGS + WHO) * (ROWS * TOKENS) + lane, acc)
    gl.thread_barrier()
    share = interval[2]
    first_cta = tile * tiles_k // share
    last_cta = ((tile + 1) * tiles_k - 1) // share
    counter = counters_ptr + tile * WGS + WHO
    last = gl.atomic_add(counter, 1, sem="acq_rel") == last_cta - first_cta
    total = acc
    if last:
        total = gl.zeros([ROWS, TOKENS], gl.float32, layout)
        for cta in range(first_cta, last_cta + 1, AT_ONCE):
            for i in gl.static_range(AT_ONCE):
                place = (cta + i) * 2 + gl.where(cta + i == first_cta, 1, 0)
                part = partial_ptr + (place * WGS + WHO) * (ROWS * TOKENS) + lane
                total += gl.load(part, mask=(lane >= 0) & (cta + i <= last_cta), other=0.0)
        gl.store(counter, 0)
    return total, last
