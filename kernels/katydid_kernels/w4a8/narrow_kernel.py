"""D = X W^T for a few rows of X and packed int4 W: `gemm.narrow_kernel` at half the bytes.

The weights are wgmma's rows, 64 a warpgroup, and their stages are dealt by `gemm.stream_k`; launched early (PDL), a CTA
has filled its ring with weights by the time X is there, and takes less than half of an SM.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from katydid_kernels.gemm.narrow_kernel import finish_columns
from katydid_kernels.gemm.ring import advance, launch_next, make_barriers, wait_for_last
from katydid_kernels.gemm.stream_k import interval_of, stages_within, sum_parts, tiles_of
from katydid_kernels.w4a8.packed_tiles import fetch_weights, multiply_packed, weight_buffers

__all__ = ["narrow_w4a8_kernel"]


@gluon.jit
def _fetch_x(x_desc, k, bar, x_bufs, stage):
    for group in gl.static_range(2):
        tma.async_copy_global_to_shared(x_desc, [0, k * 256 + group * 128], bar, x_bufs.index(stage * 2 + group))


@gluon.jit
def _produce(x_desc, codes_desc, scales_desc, ring, interval, tiles_k, groups, STAGES: gl.constexpr):
    x_bufs, codes, scales, full, empty = ring
    begin, end, _ = interval
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
def _consume(target, hooks, partials, ring, interval, tiles_k, STAGES: gl.constexpr):
    TOKENS: gl.constexpr = ring[0].type.shape[1]
    stage = 0
    phase = 0
    wait_for_last()
    first, last = tiles_of(interval, tiles_k)
    for strip in range(first, last):
        first_k, last_k = stages_within(strip, interval, tiles_k)
        acc, stage, phase = multiply_packed(0, ring, stage, phase, last_k - first_k, TOKENS, STAGES, 1, GATHERED=False)
        done = last_k - first_k == tiles_k
        if not done:
            acc, done = sum_parts(0, 1, acc, strip, first_k, interval, tiles_k, partials)
        if done:
            finish_columns(acc * 512.0, strip * 64, target, hooks)


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
    # The next kernel waits for this one's end before it reads or writes what a kernel writes, and so does this one.
    launch_next()
    tiles_k = gl.cdiv(K, 256)
    interval = interval_of(gl.cdiv(N, 64) * tiles_k, gl.maximum(tiles_k // 6, 1))
    ring = (x_bufs, codes, scales, full, empty)
    target = (out_ptr, out_stride, M, N)
    hooks = (row_scale_ptr, row_step, None, 0, bias_ptr, residual_ptr, residual_stride)
    gl.warp_specialize(
        [
            (_consume, (target, hooks, (partial_ptr, counters_ptr), ring, interval, tiles_k, STAGES)),
            (_produce, (x_desc, codes_desc, scales_desc, ring, interval, tiles_k, gl.cdiv(K, 128), STAGES)),
        ],
        [1],
        [40],
    )
