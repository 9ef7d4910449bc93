"""Partial results of pieces, and how the last piece of an item sums them up inside the same launch.

A piece leaves (maximum, sum, output) in one of its CTA's two slots.  The last piece of a group to arrive sums the
group, the last group the groups.  Up to `FAN` pieces are one group; more are about as many groups as one has pieces,
since all wait for what one CTA reads after the other.  The order is that of the pieces, not of their arrival, so the
result is the same in every run.  Arrival counters return to zero by themselves, so graph replays need no reset.

Outputs are accumulators of the tensor cores: `[D, ROWS]`, or `[ROWS, D]` where ROWS_FIRST.  A lane's two to four
neighbours lie together in memory, which for the former means the order of registers, not of rows and columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from katydid_kernels.decode_plan import FAN as PLAN_FAN

__all__ = ["combine_pieces", "write_rows"]

LOG2E = gl.constexpr(1.4426950408889634)
FAN = gl.constexpr(PLAN_FAN)


@gluon.jit
def _by_row(x, ROWS_FIRST: gl.constexpr):
    """A value a query row, shaped to meet an accumulator."""
    if ROWS_FIRST:
        return x[:, None]
    else:
        return x[None, :]


@gluon.jit
def _in_memory(acc, ROWS_FIRST: gl.constexpr):
    """An accumulator as it is stored: `[D, ROWS]` with a lane's rows r and r + 8, columns c and c + 1 last."""
    if ROWS_FIRST:
        return acc
    else:
        M: gl.constexpr = acc.shape[0]
        N: gl.constexpr = acc.shape[1]
        acc = acc.reshape([M // 16, 2, 8, N // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
        return acc.reshape([N // 8, 2 * M, 4])


@gluon.jit
def _in_registers(part, acc, ROWS_FIRST: gl.constexpr):
    """What `_in_memory` made of an accumulator, back in the shape and layout of `acc`."""
    if ROWS_FIRST:
        return part
    else:
        M: gl.constexpr = acc.shape[0]
        N: gl.constexpr = acc.shape[1]
        part = part.reshape([N // 8, M // 16, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([M, N])
        return gl.convert_layout(part, acc.type.layout, assert_trivial=True)


@gluon.jit
def _places(acc, LIVE: gl.constexpr, ROWS_FIRST: gl.constexpr):
    """Offsets of an accumulator's elements in memory, and which of them belong to a query row that exists."""
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = _in_memory(acc, ROWS_FIRST).type.layout
    if ROWS_FIRST:
        n = gl.arange(0, M, gl.SliceLayout(1, layout))[:, None]
        d = gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]
        return n * N + d, n < LIVE
    else:
        block = gl.arange(0, N // 8, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
        lane = gl.arange(0, 2 * M, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
        four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
        return (block * (2 * M) + lane) * 4 + four, block * 8 < LIVE


@gluon.jit
def _arrive(counter, expected):
    """Count up; true in the arrival that completes `expected`, which also clears the counter for the next launch."""
    gl.thread_barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel") == expected - 1
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def _slot(origin, piece):
    """Where piece `piece` of an item that begins in CTA `origin` leaves its partial result."""
    return (2 * (origin + piece) + gl.where(piece == 0, 1, 0)).to(gl.int64)


@gluon.jit
def _store_partial(partial_ptr, stats_ptr, slot, maximum, total, acc, LIVE: gl.constexpr, ROWS_FIRST: gl.constexpr):
    ROWS: gl.constexpr = maximum.shape[0]
    n = gl.arange(0, ROWS, maximum.type.layout)
    offset, live = _places(acc, LIVE, ROWS_FIRST)
    gl.store(partial_ptr + slot * acc.numel + offset, _in_memory(acc, ROWS_FIRST), mask=live)
    gl.store(stats_ptr + slot * (2 * ROWS) + n, maximum, mask=n < LIVE)
    gl.store(stats_ptr + slot * (2 * ROWS) + ROWS + n, total, mask=n < LIVE)


@gluon.jit
def _sum_partials(
    partial_ptr,
    stats_ptr,
    origin,
    begin,
    stride,
    count,
    maximum,
    total,
    acc,
    LIVE: gl.constexpr,
    ROWS_FIRST: gl.constexpr,
    UNROLL: gl.constexpr,
):
    """(maximum, total, acc) of pieces `begin + i * stride`, i < `count`; those passed give shapes and layouts only."""
    ROWS: gl.constexpr = maximum.shape[0]
    n = gl.arange(0, ROWS, maximum.type.layout)
    offset, live = _places(acc, LIVE, ROWS_FIRST)
    maximum = gl.full([ROWS], float("-inf"), gl.float32, maximum.type.layout)
    total = gl.zeros_like(maximum)
    acc = gl.zeros_like(acc)
    for first in range(0, count, UNROLL):
        maxima, totals, parts = (), (), ()
        for c in gl.static_range(UNROLL):
            real = first + c < count
            slot = _slot(origin, begin + (first + c) * stride)
            stats = stats_ptr + slot * (2 * ROWS) + n
            maxima += (gl.load(stats, mask=(n < LIVE) & real, other=float("-inf"), cache_modifier=".cg"),)  # type: ignore[assignment]
            totals += (gl.load(stats + ROWS, mask=(n < LIVE) & real, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
            part = partial_ptr + slot * acc.numel + offset
            parts += (gl.load(part, mask=live & real, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
        highest = maximum
        for c in gl.static_range(UNROLL):
            highest = gl.maximum(highest, maxima[c])
        finite = gl.where(highest == float("-inf"), 0.0, highest)
        keep = gl.exp2(maximum - finite)
        total = total * keep
        acc = acc * _by_row(keep, ROWS_FIRST)
        for c in gl.static_range(UNROLL):
            weight = gl.exp2(maxima[c] - finite)
            total += totals[c] * weight
            acc += _in_registers(parts[c], acc, ROWS_FIRST) * _by_row(weight, ROWS_FIRST)
        maximum = highest
    return maximum, total, acc


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
    LIVE: gl.constexpr,
    ROWS_FIRST: gl.constexpr,
    UNROLL: gl.constexpr,
):
    """Hand in piece `index` of `count`; the one call that arrives last gets True and the whole item's result.

    maximum and total are a value a query row, the first LIVE of them real; counter_ptr holds four int32 a CTA.
    """
    origin = gl.program_id(0) - index
    fan = gl.where((count > FAN) & (count <= FAN * FAN // 4), FAN // 2, FAN)
    group = index // fan * fan
    members = gl.minimum(count - group, fan)
    _store_partial(partial_ptr, stats_ptr, _slot(origin, index), maximum, total, acc, LIVE, ROWS_FIRST)
    done = _arrive(counter_ptr + _slot(origin, group), members)
    if done:
        maximum, total, acc = _sum_partials(
            partial_ptr, stats_ptr, origin, group, 1, members, maximum, total, acc, LIVE, ROWS_FIRST, UNROLL
        )
        if count > FAN:
            gl.thread_barrier()
            _store_partial(partial_ptr, stats_ptr, _slot(origin, group), maximum, total, acc, LIVE, ROWS_FIRST)
            groups = (count + fan - 1) // fan
            done = _arrive(counter_ptr + 2 * gl.num_programs(0) + origin, groups)
            if done:
                maximum, total, acc = _sum_partials(
                    partial_ptr, stats_ptr, origin, 0, fan, groups, maximum, total, acc, LIVE, ROWS_FIRST, UNROLL
                )
    return done, maximum, total, acc


@gluon.jit
def _quantized(result, scale_ptr, live, LIVE: gl.constexpr, GROUP: gl.constexpr, ROWS_FIRST: gl.constexpr):
    """Rows over the scale of their token, in e4m3's range; a token is GROUP rows. Stores the scales."""
    ROWS: gl.constexpr = live.shape[0]
    TOKENS: gl.constexpr = ROWS // GROUP
    largest = gl.where(live, gl.max(gl.abs(result), 1 if ROWS_FIRST else 0), 0.0)
    by_token = gl.max(largest.reshape([TOKENS, GROUP]), 1)
    scale = gl.maximum(by_token / 448.0, 1e-12)
    token = gl.arange(0, TOKENS, scale.type.layout)
    gl.store(scale_ptr + token, scale, mask=token < LIVE // GROUP)
    spread = (1.0 / scale)[:, None] + gl.zeros_like(largest.reshape([TOKENS, GROUP]))
    inverse = gl.convert_layout(spread.reshape([ROWS]), live.type.layout)
    return gl.minimum(gl.maximum(result * _by_row(inverse, ROWS_FIRST), -448.0), 448.0)


@gluon.jit
def write_rows(
    out_ptr,
    out_scale_ptr,
    lse_ptr,
    out_row,
    maximum,
    total,
    acc,
    factor,
    d,
    LIVE: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS_FIRST: gl.constexpr,
    SHIFT: gl.constexpr,
):
    """Normalise a finished item and write it: row n goes to row `out_row[n]` of the output, times `factor`.

    `d` is the output column of the accumulator's other axis. With `out_scale_ptr`, of the item's first token, the
    output is rounded to bf16 and quantised with a scale a token, whose rows are all in this item.
    """
    D: gl.constexpr = acc.numel // maximum.shape[0]
    live = gl.arange(0, maximum.shape[0], maximum.type.layout) < LIVE
    nothing = total == 0.0
    inverse = factor / gl.where(nothing, 1.0, total)
    log_sum = gl.where(nothing, float("-inf"), (maximum + gl.log2(total) - SHIFT) / LOG2E)
    result = acc * _by_row(inverse, ROWS_FIRST)
    if out_scale_ptr is not None:
        result = _quantized(result.to(gl.bfloat16).to(gl.float32), out_scale_ptr, live, LIVE, GROUP, ROWS_FIRST)
    result = result.to(out_ptr.dtype.element_ty)
    at = _by_row(out_row, ROWS_FIRST) * D + _by_row(d, not ROWS_FIRST)
    gl.store(out_ptr + at, result, mask=_by_row(live, ROWS_FIRST))
    gl.store(lse_ptr + out_row, log_sum, mask=live)
