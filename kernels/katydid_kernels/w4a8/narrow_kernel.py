"""D = X W^T for a few rows of X and packed int4 W: bound by reading W once, so every CTA reads the same share of it.

The strips of W stand on one line, each as long as its stages of K, and the line is cut into equal intervals, one a CTA:
a stream-K GEMM (Osama et al., 2023) with the weights as wgmma's rows. A strip cut in two or more is summed by whichever
CTA finishes it last, from fp32 partial sums, in the order of K: the result is the same every time.

The weights do not depend on the kernel before: launched early (PDL), a CTA has filled its ring with them by the time X
is there. A CTA takes less than half of an SM, so that this one and the next can stand on it side by side.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from katydid_kernels.gemm.ring import advance, launch_next, make_barriers, wait_for_last
from katydid_kernels.w4a8.packed_tiles import fetch_weights, multiply_packed, weight_buffers

__all__ = ["narrow_w4a8_kernel"]


@gluon.jit
def _fetch_x(x_desc, k, bar, x_bufs, stage):
    for group in gl.static_range(2):
        tma.async_copy_global_to_shared(x_desc, [0, k * 256 + group * 128], bar, x_bufs.index(stage * 2 + group))


@gluon.jit
def _produce(x_desc, codes_desc, scales_desc, ring, interval, groups, STAGES: gl.constexpr):
    x_bufs, codes, scales, full, empty = ring
    begin, end, _, tiles_k = interval
    STAGE_BYTES: gl.constexpr = (
        2 * x_desc.block_type.nbytes + codes_desc.block_type.nbytes + scales_desc.block_type.nbytes
    )
    ahead = gl.minimum(end - begin, STAGES)
    for i in range(ahead):
        step = begin + i
        mbarrier.expect(full.index(i), STAGE_BYTES)
        fetch_weights(
            codes_desc, scales_desc, step // tiles_k, step % tiles_k, groups, full.index(i), codes, scales, i
        )  # fmt: skip
    wait_for_last()
    for i in range(ahead):
        _fetch_x(x_desc, (begin + i) % tiles_k, full.index(i), x_bufs, i)
    stage = 0
    phase = 0
    for step in range(begin + STAGES, end):
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(bar, STAGE_BYTES)
        fetch_weights(codes_desc, scales_desc, step // tiles_k, step % tiles_k, groups, bar, codes, scales, stage)
        _fetch_x(x_desc, step % tiles_k, bar, x_bufs, stage)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _finish(acc, col, target, hooks):
    """Scale, bias, residual, and D token by token from an accumulator that holds it transposed."""
    out_ptr, out_stride, M, N = target
    row_scale_ptr, row_step, bias_ptr, residual_ptr, residual_stride = hooks
    layout: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    value = gl.convert_layout(acc, layout)
    rows = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    cols = col + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    inside = (rows < M)[None, :] & (cols < N)[:, None]
    value *= 512.0 * gl.load(row_scale_ptr + rows * row_step, mask=rows < M, other=0.0)[None, :]
    if bias_ptr is not None:
        value += gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)[:, None]
    if residual_ptr is not None:
        source = residual_ptr + rows.to(gl.int64)[None, :] * residual_stride + cols[:, None]
        value += gl.load(source, mask=inside, other=0.0).to(gl.float32)
    addresses = out_ptr + rows.to(gl.int64)[None, :] * out_stride + cols[:, None]
    gl.store(addresses, value.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _consume(target, hooks, partial_ptr, counters_ptr, ring, interval, STAGES: gl.constexpr):
    begin, end, share, tiles_k = interval
    TOKENS: gl.constexpr = ring[0].type.shape[1]
    # Partial sums read at once, as the registers allow.
    AT_ONCE: gl.constexpr = 2 if TOKENS == 64 else 4
    stage = 0
    phase = 0
    wait_for_last()
    if begin < end:
        for strip in range(begin // tiles_k, (end - 1) // tiles_k + 1):
            first_k = gl.maximum(begin - strip * tiles_k, 0)
            last_k = gl.minimum(end - strip * tiles_k, tiles_k)
            acc, stage, phase = multiply_packed(
                0, ring, stage, phase, last_k - first_k, TOKENS, STAGES, 1, GATHERED=False
            )
            if last_k - first_k == tiles_k:
                _finish(acc, strip * 64, target, hooks)
            else:
                # A CTA has two places: 1 for a strip it begins, 0 for one it takes up.
                layout: gl.constexpr = acc.type.layout
                lane = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] * TOKENS
                lane += gl.arange(0, TOKENS, gl.SliceLayout(0, layout))[None, :]
                place = gl.program_id(0) * 2 + gl.where(first_k == 0, 1, 0)
                gl.store(partial_ptr + place * (64 * TOKENS) + lane, acc)
                gl.thread_barrier()
                counter = counters_ptr + strip
                first_cta = strip * tiles_k // share
                last_cta = ((strip + 1) * tiles_k - 1) // share
                if gl.atomic_add(counter, 1, sem="acq_rel") == last_cta - first_cta:
                    total = gl.zeros([64, TOKENS], gl.float32, layout)
                    for cta in range(first_cta, last_cta + 1, AT_ONCE):
                        for i in gl.static_range(AT_ONCE):
                            place = (cta + i) * 2 + gl.where(cta + i == first_cta, 1, 0)
                            part = partial_ptr + place * (64 * TOKENS) + lane
                            total += gl.load(part, mask=(lane >= 0) & (cta + i <= last_cta), other=0.0)
                    gl.store(counter, 0)
                    _finish(total, strip * 64, target, hooks)


@gluon.jit(do_not_specialize=["M", "N", "K"])
def narrow_w4a8_kernel(
    x_desc, codes_desc, scales_desc, out_ptr, out_stride, partial_ptr, counters_ptr, row_scale_ptr, row_step,
    bias_ptr, residual_ptr, residual_stride, M, N, K, STAGES: gl.constexpr,
):  # fmt: skip
    """``out = (X[M, K] W[N, K]^T) * row_scale + bias + residual`` for M up to the rows of x_desc's box.

    x_desc: boxes ``[TOKENS, 128]``; codes_desc: boxes ``[1, 64, 128]`` of packed codes; scales_desc: boxes ``[128]`` of
    all scales on one line. partial: fp32 ``[2 * CTAs, 64, TOKENS]``; counters: int32, zero, one a strip. row_step: 0
    where the scale is one number.
    """
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, TOKENS, 128], x_desc.layout)
    codes, scales = weight_buffers(codes_desc, scales_desc, STAGES, 1)
    full, empty = make_barriers(STAGES, 1, 1)
    tiles_k = gl.cdiv(K, 256)
    steps = gl.cdiv(N, 64) * tiles_k
    share = gl.cdiv(steps, gl.num_programs(0))
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, steps)
    # The next kernel waits for this one's end before it reads or writes what a kernel writes, and so does this one.
    launch_next()
    ring = (x_bufs, codes, scales, full, empty)
    interval = (begin, end, share, tiles_k)
    hooks = (row_scale_ptr, row_step, bias_ptr, residual_ptr, residual_stride)
    gl.warp_specialize(
        [
            (_consume, ((out_ptr, out_stride, M, N), hooks, partial_ptr, counters_ptr, ring, interval, STAGES)),
            (_produce, (x_desc, codes_desc, scales_desc, ring, interval, gl.cdiv(K, 128), STAGES)),
        ],
        [1],
        [40],
    )
