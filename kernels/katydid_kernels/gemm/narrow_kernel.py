"""D = X W^T for a few rows of X: bound by reading W once, so every CTA reads the same share of it.

The weights are wgmma's rows, 64 a warpgroup, and their stages are dealt by `stream_k`. Weights do not depend on the
kernel before: launched early (PDL), a CTA has filled its ring with them by the time X is there. A CTA takes less than
half of an SM, so that this kernel and the next can stand on it side by side.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from katydid_kernels.gemm.expert_tiles import multiply
from katydid_kernels.gemm.ring import advance, launch_next, make_barriers, wait_for_last
from katydid_kernels.gemm.stream_k import interval_of, next_stage, stages_within, sum_parts, tiles_of

__all__ = ["finish_columns", "narrow_gemm_kernel"]


@gluon.jit
def _fetch_weights(w_desc, w_bufs, bar, tile, k, stage, WGS: gl.constexpr):
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    for part in gl.static_range(WGS):
        tma.async_copy_global_to_shared(
            w_desc, [(tile * WGS + part) * ROWS, k * BLOCK_K], bar, w_bufs.index(stage * WGS + part)
        )


@gluon.jit
def _produce(x_desc, w_desc, ring, interval, tiles_k, STAGES: gl.constexpr, WGS: gl.constexpr, AT_ONCE: gl.constexpr):
    x_bufs, w_bufs, full, empty = ring
    begin = interval[0] * AT_ONCE
    end = interval[1] * AT_ONCE
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    STAGE_BYTES: gl.constexpr = WGS * w_desc.block_type.nbytes + x_desc.block_type.nbytes
    ahead = gl.minimum(end - begin, STAGES)
    tile = begin // tiles_k
    k = begin % tiles_k
    for i in range(ahead):
        mbarrier.expect(full.index(i), STAGE_BYTES)
        _fetch_weights(w_desc, w_bufs, full.index(i), tile, k, i, WGS)
        tile, k = next_stage(tile, k, tiles_k)
    wait_for_last()
    x_tile = begin // tiles_k
    x_k = begin % tiles_k
    for i in range(ahead):
        tma.async_copy_global_to_shared(x_desc, [0, x_k * BLOCK_K], full.index(i), x_bufs.index(i))
        x_tile, x_k = next_stage(x_tile, x_k, tiles_k)
    stage = 0
    phase = 0
    for _ in range(begin + STAGES, end):
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(bar, STAGE_BYTES)
        _fetch_weights(w_desc, w_bufs, bar, tile, k, stage, WGS)
        tma.async_copy_global_to_shared(x_desc, [0, k * BLOCK_K], bar, x_bufs.index(stage))
        tile, k = next_stage(tile, k, tiles_k)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def finish_columns(acc, col, target, hooks):
    """Scale, bias, residual, and D token by token from an accumulator that holds it transposed."""
    out_ptr, out_stride, M, N = target
    row_scale_ptr, row_step, col_scale_ptr, col_step, bias_ptr, residual_ptr, residual_stride = hooks
    layout: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    value = gl.convert_layout(acc, layout)
    rows = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    cols = col + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    inside = (rows < M)[None, :] & (cols < N)[:, None]
    if row_scale_ptr is not None:
        value *= gl.load(row_scale_ptr + rows * row_step, mask=rows < M, other=0.0)[None, :]
    if col_scale_ptr is not None:
        value *= gl.load(col_scale_ptr + cols * col_step, mask=cols < N, other=0.0)[:, None]
    if bias_ptr is not None:
        value += gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)[:, None]
    if residual_ptr is not None:
        source = residual_ptr + rows.to(gl.int64)[None, :] * residual_stride + cols[:, None]
        value += gl.load(source, mask=inside, other=0.0).to(gl.float32)
    addresses = out_ptr + rows.to(gl.int64)[None, :] * out_stride + cols[:, None]
    gl.store(addresses, value.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _consume(
    WHO: gl.constexpr, target, hooks, partials, ring, interval, tiles_k,
    STAGES: gl.constexpr, WGS: gl.constexpr, PROMOTE: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = ring[0].type.shape[1]
    ROWS: gl.constexpr = ring[1].type.shape[1]
    stage = 0
    phase = 0
    wait_for_last()
    lengths = tiles_k // AT_ONCE
    first, last = tiles_of(interval, lengths)
    for tile in range(first, last):
        first_k, last_k = stages_within(tile, interval, lengths)
        acc, stage, phase = multiply(
            WHO, ring, stage, phase, (last_k - first_k) * AT_ONCE, ROWS, TOKENS, STAGES, WGS, PROMOTE,
            GATHERED=False, AT_ONCE=AT_ONCE,
        )  # fmt: skip
        done = last_k - first_k == lengths
        if not done:
            acc, done = sum_parts(WHO, WGS, acc, tile, first_k, interval, lengths, partials)
        if done:
            finish_columns(acc, (tile * WGS + WHO) * ROWS, target, hooks)


@gluon.jit(do_not_specialize=["M", "N", "K"])
def narrow_gemm_kernel(
    x_desc, w_desc, out_ptr, out_stride, partial_ptr, counters_ptr, row_scale_ptr, row_step, col_scale_ptr, col_step,
    bias_ptr, residual_ptr, residual_stride, M, N, K,
    STAGES: gl.constexpr, WGS: gl.constexpr, PROMOTE: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """``out = (X[M, K] W[N, K]^T) * row_scale * col_scale + bias + residual`` for M up to the rows of x_desc's box.

    x_desc: boxes ``[TOKENS, BLOCK_K]``; w_desc: boxes ``[64, BLOCK_K]``. partial: fp32 ``[2 * CTAs, WGS, 64, TOKENS]``;
    counters: int32, zero, one a warpgroup's tile. row_step, col_step: 0 where the scale is one number. AT_ONCE: stages
    multiplied before waiting for the first (PROMOTE), of which K is a multiple.
    """
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, BLOCK_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES * WGS, ROWS, BLOCK_K], w_desc.layout)
    full, empty = make_barriers(STAGES, 1, WGS)
    # The next kernel waits for this one's end before it reads or writes what a kernel writes, and so does this one.
    launch_next()
    tiles_k = gl.cdiv(K, BLOCK_K)
    # Not much more than five pieces a tile: they cost more to sum than they save in reading.
    interval = interval_of(gl.cdiv(N, WGS * ROWS) * (tiles_k // AT_ONCE), gl.maximum(tiles_k // (5 * AT_ONCE), 1))
    hooks = (row_scale_ptr, row_step, col_scale_ptr, col_step, bias_ptr, residual_ptr, residual_stride)
    ring = (x_bufs, w_bufs, full, empty)
    target = (out_ptr, out_stride, M, N)
    partials = (partial_ptr, counters_ptr)
    if WGS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, target, hooks, partials, ring, interval, tiles_k, STAGES, WGS, PROMOTE, AT_ONCE)),
                (_produce, (x_desc, w_desc, ring, interval, tiles_k, STAGES, WGS, AT_ONCE)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, target, hooks, partials, ring, interval, tiles_k, STAGES, WGS, PROMOTE, AT_ONCE)),
                (_consume, (1, target, hooks, partials, ring, interval, tiles_k, STAGES, WGS, PROMOTE, AT_ONCE)),
                (_produce, (x_desc, w_desc, ring, interval, tiles_k, STAGES, WGS, AT_ONCE)),
            ],
            [4, 1],
            [176, 24],
        )
