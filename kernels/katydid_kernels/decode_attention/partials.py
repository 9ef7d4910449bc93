"""Partial results of pieces, and how the last piece of an item sums them up inside the same launch.

A piece leaves (maximum, sum, output) in one of its CTA's two slots.  The last piece of a group of `FAN` to arrive sums
the group, the last group sums the groups: no CTA reads more than `FAN` (or pieces / FAN) partials, and a few round
trips to L2 combine any number of pieces.  Arrival counters return to zero by themselves, so graph replays need no
reset.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["FAN", "combine_pieces", "write_rows"]

LOG2E = gl.constexpr(1.4426950408889634)
FAN = gl.constexpr(16)


@gluon.jit
def _arrive(counter, expected):
    """Count up; true in the arrival that completes `expected`, which also clears the counter for the next launch."""
    gl.thread_barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel") == expected - 1
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def _slot(first_cta, piece):
    """Where piece `piece` of an item that begins in `first_cta` leaves its partial result."""
    return (2 * (first_cta + piece) + gl.where(piece == 0, 1, 0)).to(gl.int64)


@gluon.jit
def _sum_partials(
    partial_ptr,
    stats_ptr,
    first_cta,
    begin,
    stride,
    count,
    D: gl.constexpr,
    ROWS: gl.constexpr,
    LIVE: gl.constexpr,
    layout: gl.constexpr,
    UNROLL: gl.constexpr,
):
    """Combine the partials of pieces `begin`, `begin + stride`, ... (`count` of them) into (maximum, total, output)."""
    n = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    d = gl.arange(0, D, gl.SliceLayout(1, layout))
    maximum = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(0, layout))
    acc = gl.zeros([D, ROWS], gl.float32, layout)
    for j in range(0, count, UNROLL):
        new_maximum = maximum
        for c in gl.static_range(UNROLL):
            slot = _slot(first_cta, begin + gl.minimum(j + c, count - 1) * stride)
            m = gl.load(stats_ptr + slot * (2 * ROWS) + n, mask=n < LIVE, other=0.0, cache_modifier=".cg")
            new_maximum = gl.maximum(new_maximum, m)
        finite = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        keep = gl.exp2(maximum - finite)
        total = total * keep
        acc = acc * keep[None, :]
        for c in gl.static_range(UNROLL):
            slot = _slot(first_cta, begin + gl.minimum(j + c, count - 1) * stride)
            m = gl.load(stats_ptr + slot * (2 * ROWS) + n, mask=n < LIVE, other=0.0, cache_modifier=".cg")
            t = gl.load(stats_ptr + slot * (2 * ROWS) + ROWS + n, mask=n < LIVE, other=0.0, cache_modifier=".cg")
            at = partial_ptr + slot * (ROWS * D) + d[:, None] * ROWS + n[None, :]
            part = gl.load(at, mask=(n < LIVE)[None, :], other=0.0, cache_modifier=".cg")
            weight = gl.where(j + c < count, gl.exp2(m - finite), 0.0)
            total += t * weight
            acc += part * weight[None, :]
        maximum = new_maximum
    return maximum, total, acc


@gluon.jit
def _store_partial(
    partial_ptr,
    stats_ptr,
    slot,
    maximum,
    total,
    acc,
    D: gl.constexpr,
    ROWS: gl.constexpr,
    LIVE: gl.constexpr,
    layout: gl.constexpr,
):
    n = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    d = gl.arange(0, D, gl.SliceLayout(1, layout))
    live = n < LIVE
    gl.store(partial_ptr + slot * (ROWS * D) + d[:, None] * ROWS + n[None, :], acc, mask=live[None, :])
    gl.store(stats_ptr + slot * (2 * ROWS) + n, maximum, mask=live)
    gl.store(stats_ptr + slot * (2 * ROWS) + ROWS + n, total, mask=live)


@gluon.jit
def combine_pieces(
    partial_ptr,
    stats_ptr,
    counter_ptr,
    index,
    count,
    maximum,
    total,
    acc,
    D: gl.constexpr,
    ROWS: gl.constexpr,
    LIVE: gl.constexpr,
    layout: gl.constexpr,
    UNROLL: gl.constexpr,
):
    """Hand in piece `index` of `count`; the one call that arrives last gets True and the whole item's result.

    maximum and total are `[ROWS]`, acc `[D, ROWS]` in `layout`, the first LIVE rows of them real; counter_ptr holds
    four int32 a CTA.
    """
    first_cta = gl.program_id(0) - index
    group = index // FAN * FAN
    members = gl.minimum(count - group, FAN)
    _store_partial(partial_ptr, stats_ptr, _slot(first_cta, index), maximum, total, acc, D, ROWS, LIVE, layout)
    done = _arrive(counter_ptr + _slot(first_cta, group), members)
    if done:
        maximum, total, acc = _sum_partials(
            partial_ptr, stats_ptr, first_cta, group, 1, members, D, ROWS, LIVE, layout, UNROLL
        )
        if count > FAN:
            gl.thread_barrier()
            _store_partial(partial_ptr, stats_ptr, _slot(first_cta, group), maximum, total, acc, D, ROWS, LIVE, layout)
            groups = (count + FAN - 1) // FAN
            done = _arrive(counter_ptr + 2 * (gl.num_programs(0) + first_cta), groups)
            if done:
                maximum, total, acc = _sum_partials(
                    partial_ptr, stats_ptr, first_cta, 0, FAN, groups, D, ROWS, LIVE, layout, UNROLL
                )
    return done, maximum, total, acc


@gluon.jit
def write_rows(
    out_ptr,
    lse_ptr,
    out_row,
    maximum,
    total,
    acc,
    factor,
    D: gl.constexpr,
    ROWS: gl.constexpr,
    LIVE: gl.constexpr,
    layout: gl.constexpr,
    SHIFT: gl.constexpr,
):
    """Normalise a finished item and write it: row n goes to row `out_row[n]` of the output, times `factor`."""
    live = gl.arange(0, ROWS, gl.SliceLayout(0, layout)) < LIVE
    d = gl.arange(0, D, gl.SliceLayout(1, layout))
    nothing = total == 0.0
    inverse = factor / gl.where(nothing, 1.0, total)
    log_sum = gl.where(nothing, float("-inf"), (maximum + gl.log2(total) - SHIFT) / LOG2E)
    result = (acc * inverse[None, :]).to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + out_row[None, :] * D + d[:, None], result, mask=live[None, :])
    gl.store(lse_ptr + out_row, log_sum, mask=live)
