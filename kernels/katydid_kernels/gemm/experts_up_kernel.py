"""Gate-up projection of routed experts for many tokens: grouped GEMM, SwiGLU and quantisation as one persistent kernel.

A CTA's tile is ``WGS * ROWS`` interleaved gate and up rows by `TOKENS` rows of one expert, over all of K: at TP8 of Hy3
(384 rows an expert) two tiles wide, so x is read through the index twice and never gathered into memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from katydid_kernels.gemm.expert_tiles import (
    accumulator_layout,
    copy_rows,
    gather,
    multiply,
    row_layout,
    scaled_swiglu,
    store_columns,
    tokens_of,
)
from katydid_kernels.gemm.ring import advance, launch_next, make_barriers, wait_for_last

__all__ = ["experts_up_kernel"]


@gluon.jit
def _produce(
    x_ptr, x_stride, w_desc, rows_ptr, tiles_ptr, ring, problem, STAGES: gl.constexpr, WGS: gl.constexpr
):  # fmt: skip
    x_bufs, w_bufs, full, empty = ring
    items, tiles_n, tiles_k = problem
    TOKENS: gl.constexpr = x_bufs.type.shape[1]
    BLOCK_K: gl.constexpr = x_bufs.type.shape[2]
    GROUPS: gl.constexpr = w_desc.block_type.shape[1]
    layout: gl.constexpr = row_layout(BLOCK_K, x_bufs.dtype.primitive_bitwidth)
    cols = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    lane = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        entry = tiles_ptr + item // tiles_n * 4
        expert = gl.load(entry)
        end = gl.load(entry + 2)
        row = gl.load(entry + 1) + lane
        valid = (row < end)[:, None]
        token = tokens_of(row, end, rows_ptr, 1)
        source = gather(x_ptr, token, x_stride, cols)
        for k in range(tiles_k):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, WGS * w_desc.block_type.nbytes)
            for part in gl.static_range(WGS):
                group = (item % tiles_n * WGS + part) * GROUPS
                tma.async_copy_global_to_shared(
                    w_desc, [expert, group, 0, 0, k * BLOCK_K], ready, w_bufs.index(stage * WGS + part)
                )
            copy_rows(x_bufs.index(stage), source + k * BLOCK_K, valid, ready)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _widen(left, layout: gl.constexpr):
    """An accumulator with as many columns of zeros after it: registers put side by side, nothing moves."""
    both = gl.join(left, gl.zeros_like(left)).permute((0, 2, 1)).reshape([left.shape[0], 2 * left.shape[1]])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def _consume(
    WHO: gl.constexpr, rows_ptr, tiles_ptr, h_ptr, h_stride, scales, ring, problem,
    STAGES: gl.constexpr, WGS: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    x_bufs, w_bufs, _, _ = ring
    items, tiles_n, tiles_k = problem
    up_scale_ptr, inverse_scale, token_scale_ptr = scales
    TOKENS: gl.constexpr = x_bufs.type.shape[1]
    HALF: gl.constexpr = TOKENS // 2
    ROWS: gl.constexpr = w_bufs.type.shape[2] * 16
    out_layout: gl.constexpr = gl.BlockedLayout([16, 1], [2, 16], [1, 4], [0, 1])
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        entry = tiles_ptr + item // tiles_n * 4
        row = gl.load(entry + 1)
        end = gl.load(entry + 2)
        if end - row > HALF:
            acc, stage, phase = multiply(WHO, ring, stage, phase, tiles_k, ROWS, TOKENS, STAGES, WGS, PROMOTE, True)
        else:
            # The last tile of an expert is on average half empty: half the columns take half the time.
            half, stage, phase = multiply(WHO, ring, stage, phase, tiles_k, ROWS, HALF, STAGES, WGS, PROMOTE, True)
            acc = _widen(half, accumulator_layout(TOKENS, x_bufs.dtype.primitive_bitwidth))
        scale = up_scale_ptr + gl.load(entry) * 2
        up_scale = gl.load(scale + 1) * inverse_scale
        h = scaled_swiglu(acc, gl.load(scale), up_scale, row, end, token_scale_ptr, rows_ptr, 1)
        col = (item % tiles_n * WGS + WHO) * (ROWS // 2)
        store_columns(h, h_ptr, h_stride, row, end, col, out_layout)


@gluon.jit(do_not_specialize=["H"])
def experts_up_kernel(
    x_ptr, x_stride, w_desc, h_ptr, h_stride, rows_ptr, tiles_ptr, tile_count_ptr,
    up_scale_ptr, inverse_scale_ptr, token_scale_ptr, H, WIDTH,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr, PROMOTE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, X_LAYOUT: gl.constexpr,
):  # fmt: skip
    """``h[r] = swiglu(x[rows[r]] @ w13[expert of r]^T * scales) * inverse_scale`` for every tile of a `RoutePlan`.

    w_desc: boxes ``[1, ROWS / 16, 2, 8, BLOCK_K]`` of w13 seen as ``[E, WIDTH / 8, 2, 8, H]``. up_scale: fp32
    ``[E, 2]``; inverse_scale: fp32 ``[1]``; token_scale: fp32 ``[T]`` or None.
    """
    GROUPS: gl.constexpr = w_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[4]
    x_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, TOKENS, BLOCK_K], X_LAYOUT)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES * WGS, 1, GROUPS, 2, 8, BLOCK_K], w_desc.layout)
    full, empty = make_barriers(STAGES, 129, WGS)
    tiles_n = WIDTH // (GROUPS * 8 * WGS)
    tiles_k = H // BLOCK_K
    launch_next()
    wait_for_last()
    items = gl.load(tile_count_ptr) * tiles_n
    scales = (up_scale_ptr, gl.load(inverse_scale_ptr), token_scale_ptr)
    ring = (x_bufs, w_bufs, full, empty)
    problem = (items, tiles_n, tiles_k)
    if WGS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, rows_ptr, tiles_ptr, h_ptr, h_stride, scales, ring, problem, STAGES, WGS, PROMOTE)),
                (_consume, (1, rows_ptr, tiles_ptr, h_ptr, h_stride, scales, ring, problem, STAGES, WGS, PROMOTE)),
                (_produce, (x_ptr, x_stride, w_desc, rows_ptr, tiles_ptr, ring, problem, STAGES, WGS)),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, rows_ptr, tiles_ptr, h_ptr, h_stride, scales, ring, problem, STAGES, WGS, PROMOTE)),
                (_consume, (1, rows_ptr, tiles_ptr, h_ptr, h_stride, scales, ring, problem, STAGES, WGS, PROMOTE)),
                (_consume, (2, rows_ptr, tiles_ptr, h_ptr, h_stride, scales, ring, problem, STAGES, WGS, PROMOTE)),
                (_produce, (x_ptr, x_stride, w_desc, rows_ptr, tiles_ptr, ring, problem, STAGES, WGS)),
            ],
            [4, 4, 4],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
