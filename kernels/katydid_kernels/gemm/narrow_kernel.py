"""D = X W^T for a few rows of X: bound by reading W once, so every CTA reads the same share of it.

The tiles of W (64 rows a warpgroup) stand on one line, each as long as its stages of K, and the line is cut into equal
intervals, one a CTA: a stream-K GEMM (Osama et al., 2023) with the weights as wgmma's rows. A tile cut in two or more
is summed by whichever CTA finishes it last, from fp32 partial sums, in the order of K: the result is the same every
time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from katydid_kernels.gemm.expert_tiles import multiply
from katydid_kernels.gemm.ring import advance, make_barriers

__all__ = ["narrow_gemm_kernel"]


@gluon.jit
def _produce(x_desc, w_desc, ring, interval, STAGES: gl.constexpr, WGS: gl.constexpr):
    x_bufs, w_bufs, full, empty = ring
    begin, end, _, tiles_k = interval
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    stage = 0
    phase = 1
    for step in range(begin, end):
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(bar, WGS * w_desc.block_type.nbytes + x_desc.block_type.nbytes)
        row = step // tiles_k * (WGS * ROWS)
        k = step % tiles_k * BLOCK_K
        for part in gl.static_range(WGS):
            tma.async_copy_global_to_shared(w_desc, [row + part * ROWS, k], bar, w_bufs.index(stage * WGS + part))
        tma.async_copy_global_to_shared(x_desc, [0, k], bar, x_bufs.index(stage))
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _finish(acc, col, target, hooks):
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
    WHO: gl.constexpr, target, hooks, partial_ptr, counters_ptr, ring, interval,
    STAGES: gl.constexpr, WGS: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    x_bufs, w_bufs, _, _ = ring
    begin, end, share, tiles_k = interval
    TOKENS: gl.constexpr = x_bufs.type.shape[1]
    ROWS: gl.constexpr = w_bufs.type.shape[1]
    # Partial sums read at once, as the registers allow.
    AT_ONCE: gl.constexpr = 2 if TOKENS == 64 else 4
    stage = 0
    phase = 0
    if begin < end:
        for tile in range(begin // tiles_k, (end - 1) // tiles_k + 1):
            first_k = gl.maximum(begin - tile * tiles_k, 0)
            last_k = gl.minimum(end - tile * tiles_k, tiles_k)
            acc, stage, phase = multiply(
                WHO, ring, stage, phase, last_k - first_k, ROWS, TOKENS, STAGES, WGS, PROMOTE, GATHERED=False
            )
            col = (tile * WGS + WHO) * ROWS
            if last_k - first_k == tiles_k:
                _finish(acc, col, target, hooks)
            else:
                # A CTA has two places: 1 for a tile it begins, 0 for one it takes up.
                layout: gl.constexpr = acc.type.layout
                lane = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None] * TOKENS
                lane += gl.arange(0, TOKENS, gl.SliceLayout(0, layout))[None, :]
                place = gl.program_id(0) * 2 + gl.where(first_k == 0, 1, 0)
                gl.store(partial_ptr + (place * WGS + WHO) * (ROWS * TOKENS) + lane, acc)
                gl.thread_barrier()
                counter = counters_ptr + tile * WGS + WHO
                first_cta = tile * tiles_k // share
                last_cta = ((tile + 1) * tiles_k - 1) // share
                if gl.atomic_add(counter, 1, sem="acq_rel") == last_cta - first_cta:
                    total = gl.zeros([ROWS, TOKENS], gl.float32, layout)
                    for cta in range(first_cta, last_cta + 1, AT_ONCE):
                        for i in gl.static_range(AT_ONCE):
                            place = (cta + i) * 2 + gl.where(cta + i == first_cta, 1, 0)
                            part = partial_ptr + (place * WGS + WHO) * (ROWS * TOKENS) + lane
                            total += gl.load(part, mask=(lane >= 0) & (cta + i <= last_cta), other=0.0)
                    gl.store(counter, 0)
                    _finish(total, col, target, hooks)


@gluon.jit(do_not_specialize=["M", "N", "K"])
def narrow_gemm_kernel(
    x_desc, w_desc, out_ptr, out_stride, partial_ptr, counters_ptr, row_scale_ptr, row_step, col_scale_ptr, col_step,
    bias_ptr, residual_ptr, residual_stride, M, N, K,
    STAGES: gl.constexpr, WGS: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    """``out = (X[M, K] W[N, K]^T) * row_scale * col_scale + bias + residual`` for M up to the rows of x_desc's box.

    x_desc: boxes ``[TOKENS, BLOCK_K]``; w_desc: boxes ``[64, BLOCK_K]``. partial: fp32 ``[2 * CTAs, WGS, 64, TOKENS]``;
    counters: int32, zero, one a warpgroup's tile. row_step, col_step: 0 where the scale is one number.
    """
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, BLOCK_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES * WGS, ROWS, BLOCK_K], w_desc.layout)
    full, empty = make_barriers(STAGES, 1, WGS)
    tiles_k = gl.cdiv(K, BLOCK_K)
    steps = gl.cdiv(N, WGS * ROWS) * tiles_k
    # Not much more than five pieces a tile: they cost more to sum than they save in reading.
    share = gl.maximum(gl.cdiv(steps, gl.num_programs(0)), tiles_k // 5)
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, steps)
    hooks = (row_scale_ptr, row_step, col_scale_ptr, col_step, bias_ptr, residual_ptr, residual_stride)
    ring = (x_bufs, w_bufs, full, empty)
    target = (out_ptr, out_stride, M, N)
    interval = (begin, end, share, tiles_k)
    if WGS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, target, hooks, partial_ptr, counters_ptr, ring, interval, STAGES, WGS, PROMOTE)),
                (_produce, (x_desc, w_desc, ring, interval, STAGES, WGS)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, target, hooks, partial_ptr, counters_ptr, ring, interval, STAGES, WGS, PROMOTE)),
                (_consume, (1, target, hooks, partial_ptr, counters_ptr, ring, interval, STAGES, WGS, PROMOTE)),
                (_produce, (x_desc, w_desc, ring, interval, STAGES, WGS)),
            ],
            [4, 1],
            [176, 24],
        )
