"""D = X W^T for a few rows of X and packed int4 W: `gemm.narrow_kernel` at half the bytes.

The weights are wgmma's rows, 64 a warpgroup, and their stages are dealt by `gemm.stream_k`; launched early (PDL), a CTA
has filled its ring with weights by the time X is there, and takes less than half of an SM.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from katydid_kernels.gemm.narrow_kernel import finish_columns
from katydid_kernels.gemm.ring import advance, launch_next, make_barriers, wait_for_last
from katydid_kernels.gemm.stream_k import interval_of, next_stage, stages_within, sum_parts, tiles_of
from katydid_kernels.w4a8.packed_tiles import fetch_weights, multiply_packed, strip_of, weight_buffers

__all__ = ["narrow_w4a8_kernel"]


@gluon.jit
def _fetch_x(x_desc, k, bar, x_bufs, stage):
    for group in gl.static_range(2):
        tma.async_copy_global_to_shared(x_desc, [0, k * 256 + group * 128], bar, x_bufs.index(stage * 2 + group))


@gluon.jit
def _fetch_strips(weight, tile, k, bar, ring, stage, WGS: gl.constexpr):
    codes_desc, scales_desc, strips, groups = weight
    for part in gl.static_range(WGS):
        strip = strip_of(0, tile * WGS + part, strips)
        fetch_weights(codes_desc, scales_desc, strip, k, groups, bar, ring[1], ring[2], stage * WGS + part)


@gluon.jit
def _produce(x_desc, weight, ring, interval, tiles_k, STAGES: gl.constexpr, WGS: gl.constexpr):
    x_bufs, full, empty = ring[0], ring[3], ring[4]
    begin, end, _ = interval
    WEIGHT_BYTES: gl.constexpr = weight[0].block_type.nbytes + weight[1].block_type.nbytes
    STAGE_BYTES: gl.constexpr = WGS * WEIGHT_BYTES + 2 * x_desc.block_type.nbytes
    ahead = gl.minimum(end - begin, STAGES)
    tile = begin // tiles_k
    k = begin % tiles_k
    for i in range(ahead):
        mbarrier.expect(full.index(i), STAGE_BYTES)
        _fetch_strips(weight, tile, k, full.index(i), ring, i, WGS)
        tile, k = next_stage(tile, k, tiles_k)
    wait_for_last()
    x_tile = begin // tiles_k
    x_k = begin % tiles_k
    for i in range(ahead):
        _fetch_x(x_desc, x_k, full.index(i), x_bufs, i)
        x_tile, x_k = next_stage(x_tile, x_k, tiles_k)
    stage = 0
    phase = 0
    for _ in range(begin + STAGES, end):
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(bar, STAGE_BYTES)
        _fetch_strips(weight, tile, k, bar, ring, stage, WGS)
        _fetch_x(x_desc, k, bar, x_bufs, stage)
        tile, k = next_stage(tile, k, tiles_k)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _consume(
    WHO: gl.constexpr, target, hooks, partials, ring, interval, tiles_k, STAGES: gl.constexpr, WGS: gl.constexpr
):  # fmt: skip
    TOKENS: gl.constexpr = ring[0].type.shape[1]
    stage = 0
    phase = 0
    wait_for_last()
    first, last = tiles_of(interval, tiles_k)
    for tile in range(first, last):
        first_k, last_k = stages_within(tile, interval, tiles_k)
        acc, stage, phase = multiply_packed(WHO, ring, stage, phase, last_k - first_k, TOKENS, STAGES, WGS)
        done = last_k - first_k == tiles_k
        if not done:
            acc, done = sum_parts(WHO, WGS, acc, tile, first_k, interval, tiles_k, partials)
        if done:
            finish_columns(acc * 512.0, (tile * WGS + WHO) * 64, target, hooks)


@gluon.jit(do_not_specialize=["M", "N", "K"])
def narrow_w4a8_kernel(
    x_desc, codes_desc, scales_desc, out_ptr, out_stride, partial_ptr, counters_ptr, row_scale_ptr, row_step,
    bias_ptr, residual_ptr, residual_stride, M, N, K,
    STAGES: gl.constexpr, WGS: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """``out = (X[M, K] W[N, K]^T) * row_scale + bias + residual`` for M up to the rows of x_desc's box.

    x_desc: boxes ``[TOKENS, 128]``; codes_desc: boxes ``[1, 64, 128]`` of packed codes; scales_desc: boxes ``[128]`` of
    all scales on one line. partial: fp32 ``[2 * CTAs, WGS, 64, TOKENS]``; counters: int32, zero, one a strip.
    row_step: 0 where the scale is one number. PIECES: how many CTAs may share a strip's columns, about.
    """
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, TOKENS, 128], x_desc.layout)
    codes, scales = weight_buffers(codes_desc, scales_desc, STAGES, WGS)
    full, empty = make_barriers(STAGES, 1, WGS)
    # The next kernel waits for this one's end before it reads or writes what a kernel writes, and so does this one.
    launch_next()
    tiles_k = gl.cdiv(K, 256)
    interval = interval_of(gl.cdiv(N, 64 * WGS) * tiles_k, gl.cdiv(tiles_k, PIECES))
    ring = (x_bufs, codes, scales, full, empty)
    target = (out_ptr, out_stride, M, N)
    hooks = (row_scale_ptr, row_step, None, 0, bias_ptr, residual_ptr, residual_stride)
    weight = (codes_desc, scales_desc, gl.cdiv(N, 64), gl.cdiv(K, 128))
    partials = (partial_ptr, counters_ptr)
    if WGS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, target, hooks, partials, ring, interval, tiles_k, STAGES, WGS)),
                (_produce, (x_desc, weight, ring, interval, tiles_k, STAGES, WGS)),
            ],
            [1],
            [40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, target, hooks, partials, ring, interval, tiles_k, STAGES, WGS)),
                (_consume, (1, target, hooks, partials, ring, interval, tiles_k, STAGES, WGS)),
                (_produce, (x_desc, weight, ring, interval, tiles_k, STAGES, WGS)),
            ],
            [4, 1],
            [104, 24],
        )
