"""Gate-up projection of routed experts for many tokens: grouped GEMM, SwiGLU and quantisation as one persistent kernel.

A CTA's tile is ``WGS * ROWS`` interleaved gate and up rows by 128 or 192 rows of one expert, over all of K: at TP8 of
Hy3 (384 rows an expert) two tiles wide, so x is read through the index twice and never gathered into memory. L2 bounds
it: a tile of 192 x 192 moves a fifth less for its work than one of 192 x 128. Shapes being powers of two, 192 tokens
are two accumulators, 128 and 64 wide; the last tile of an expert multiplies as many columns as it has rows for.

With scales of blocks (a token by 128 of K, 128 x 128 of weights) h is left in bf16: 128 of its columns, which share a
scale, come from several tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from katydid_kernels.gemm.expert_tiles import (
    accumulator_layout,
    copy_rows,
    copy_scales,
    gather,
    multiply,
    multiply_blocks,
    row_layout,
    scaled_swiglu,
    stage_operands,
    store_columns,
    tokens_of,
)
from katydid_kernels.gemm.ring import advance, before, launch_next, make_barriers, wait_for_last

__all__ = ["experts_up_kernel"]


@gluon.jit
def _produce(
    x_ptr, x_stride, w_desc, token_scale_ptr, token_rows, rings, problem,
    EXTRA: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    rows_ptr, tiles_ptr = token_rows
    ring, extra_ring, scale_bufs = rings
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
        first = gl.load(entry + 1)
        end = gl.load(entry + 2)
        valid = (first + lane < end)[:, None]
        source = gather(x_ptr, tokens_of(first + lane, end, rows_ptr, 1), x_stride, cols)
        if BLOCKS:
            slot = first + gl.arange(0, TOKENS, gl.BlockedLayout([1], [32], [4], [0]))
            scale_source = token_scale_ptr + tokens_of(slot, end, rows_ptr, 1) * tiles_k
        if EXTRA > 0:
            extra = first + TOKENS + gl.arange(0, EXTRA, gl.SliceLayout(1, layout))
            extra_valid = (extra < end)[:, None]
            extra_source = gather(x_ptr, tokens_of(extra, end, rows_ptr, 1), x_stride, cols)
        for k in range(tiles_k):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, WGS * w_desc.block_type.nbytes)
            for part in gl.static_range(WGS):
                group = (item % tiles_n * WGS + part) * GROUPS
                tma.async_copy_global_to_shared(
                    w_desc, [expert, group, 0, 0, k * BLOCK_K], ready, w_bufs.index(stage * WGS + part)
                )
            if EXTRA > 0:
                copy_rows(extra_ring[0].index(stage), extra_source + k * BLOCK_K, extra_valid, None)
            if BLOCKS:
                copy_scales(scale_bufs.index(stage), scale_source + k, slot < end, None)
            copy_rows(x_bufs.index(stage), source + k * BLOCK_K, valid, ready)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _multiply_both(
    WHO: gl.constexpr, ring, extra_ring, stage, phase, steps, ROWS: gl.constexpr, STAGES: gl.constexpr,
    WGS: gl.constexpr,
):  # fmt: skip
    """The products with both parts of a tile's tokens, accumulated by the tensor cores."""
    TOKENS: gl.constexpr = ring[0].type.shape[1]
    EXTRA: gl.constexpr = extra_ring[0].type.shape[1]
    BITS: gl.constexpr = ring[0].dtype.primitive_bitwidth
    acc = gl.zeros([ROWS, TOKENS], gl.float32, accumulator_layout(TOKENS, BITS))
    extra = gl.zeros([ROWS, EXTRA], gl.float32, accumulator_layout(EXTRA, BITS))
    for k in range(steps):
        mbarrier.wait(ring[2].index(stage), phase)
        w, x = stage_operands(WHO, ring, stage, ROWS, TOKENS, WGS, True)
        acc = warpgroup_mma(w, x, acc, use_acc=k > 0, is_async=True)
        w, x = stage_operands(WHO, extra_ring, stage, ROWS, EXTRA, WGS, False)
        extra = warpgroup_mma(w, x, extra, use_acc=k > 0, is_async=True)
        acc, extra = warpgroup_mma_wait(2, deps=(acc, extra))
        mbarrier.arrive(ring[3].index(before(stage, STAGES)), count=1, pred=k > 0)
        stage, phase = advance(stage, phase, STAGES)
    acc, extra = warpgroup_mma_wait(0, deps=(acc, extra))
    mbarrier.arrive(ring[3].index(before(stage, STAGES)), count=1)
    return acc, extra, stage, phase


@gluon.jit
def _multiply_part(
    WHO: gl.constexpr, ring, scale_bufs, up_scale_ptr, entry, col, stage, phase, steps, TOKENS: gl.constexpr,
    WIDTH: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr, PROMOTE: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """The products with the first TOKENS tokens of a tile."""
    ROWS: gl.constexpr = ring[1].type.shape[2] * 16
    if BLOCKS:
        gate = up_scale_ptr + (gl.load(entry) * (2 * WIDTH // 128) + col // 128) * steps
        weight_scales = (gate, gate + WIDTH // 128 * steps)
        acc, stage, phase = multiply_blocks(
            WHO, ring, scale_bufs, weight_scales, stage, phase, steps, ROWS, TOKENS, STAGES, WGS, True
        )
    else:
        acc, stage, phase = multiply(WHO, ring, stage, phase, steps, ROWS, TOKENS, STAGES, WGS, PROMOTE, True)
    return acc, stage, phase


@gluon.jit
def _finish(acc, offset, col, entry, target, scales, rows_ptr, BITS: gl.constexpr, BLOCKS: gl.constexpr):
    """SwiGLU of an accumulator, quantised and stored from row `offset` of the tile; 64 tokens at a time, and what it
    needs loaded only here, because registers are few."""
    up_scale_ptr, inverse_scale_ptr, token_scale_ptr = scales
    row = gl.load(entry + 1) + offset
    end = gl.load(entry + 2)
    if BLOCKS:
        token_scale_ptr = None
        factors = (1.0, 1.0)
    else:
        scale = up_scale_ptr + gl.load(entry) * 2
        factors = (gl.load(scale), gl.load(scale + 1) * gl.load(inverse_scale_ptr))
    if acc.shape[1] == 128:
        layout: gl.constexpr = accumulator_layout(64, BITS)
        left, right = acc.reshape([acc.shape[0], 2, 64]).permute((0, 2, 1)).split()
        left = gl.convert_layout(left, layout, assert_trivial=True)
        right = gl.convert_layout(right, layout, assert_trivial=True)
        _store_part(left, row, end, col, target, factors, token_scale_ptr, rows_ptr)
        _store_part(right, row + 64, end, col, target, factors, token_scale_ptr, rows_ptr)
    else:
        _store_part(acc, row, end, col, target, factors, token_scale_ptr, rows_ptr)


@gluon.jit
def _store_part(part, row, end, col, target, factors, token_scale_ptr, rows_ptr):
    h_ptr, h_stride = target
    gate_scale, up_scale = factors
    out_layout: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    h = scaled_swiglu(part, gate_scale, up_scale, row, end, token_scale_ptr, rows_ptr, 1)
    store_columns(h, h_ptr, h_stride, row, end, col, out_layout)


@gluon.jit
def _consume(
    WHO: gl.constexpr, token_rows, target, scales, rings, problem, WIDTH: gl.constexpr,
    EXTRA: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr, PROMOTE: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    rows_ptr, tiles_ptr = token_rows
    ring, extra_ring, scale_bufs = rings
    items, tiles_n, tiles_k = problem
    TOKENS: gl.constexpr = ring[0].type.shape[1]
    HALF: gl.constexpr = TOKENS // 2
    ROWS: gl.constexpr = ring[1].type.shape[2] * 16
    BITS: gl.constexpr = ring[0].dtype.primitive_bitwidth
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        entry = tiles_ptr + item // tiles_n * 4
        rows = gl.load(entry + 2) - gl.load(entry + 1)
        col = (item % tiles_n * WGS + WHO) * (ROWS // 2)
        if rows <= HALF:
            half, stage, phase = _multiply_part(
                WHO, ring, scale_bufs, scales[0], entry, col, stage, phase, tiles_k, HALF,
                WIDTH, STAGES, WGS, PROMOTE, BLOCKS,
            )  # fmt: skip
            _finish(half, 0, col, entry, target, scales, rows_ptr, BITS, BLOCKS)
        # Two branches, because the first is decided when the kernel is compiled and takes the others away.
        elif EXTRA == 0:  # noqa: SIM114
            acc, stage, phase = _multiply_part(
                WHO, ring, scale_bufs, scales[0], entry, col, stage, phase, tiles_k, TOKENS,
                WIDTH, STAGES, WGS, PROMOTE, BLOCKS,
            )  # fmt: skip
            _finish(acc, 0, col, entry, target, scales, rows_ptr, BITS, BLOCKS)
        elif rows <= TOKENS:
            acc, stage, phase = _multiply_part(
                WHO, ring, scale_bufs, scales[0], entry, col, stage, phase, tiles_k, TOKENS,
                WIDTH, STAGES, WGS, PROMOTE, BLOCKS,
            )  # fmt: skip
            _finish(acc, 0, col, entry, target, scales, rows_ptr, BITS, BLOCKS)
        else:
            acc, extra, stage, phase = _multiply_both(WHO, ring, extra_ring, stage, phase, tiles_k, ROWS, STAGES, WGS)
            _finish(acc, 0, col, entry, target, scales, rows_ptr, BITS, BLOCKS)
            _finish(extra, TOKENS, col, entry, target, scales, rows_ptr, BITS, BLOCKS)


@gluon.jit
def experts_up_kernel(
    x_ptr, x_stride, w_desc, h_ptr, rows_ptr, tiles_ptr, tile_count_ptr,
    up_scale_ptr, inverse_scale_ptr, token_scale_ptr, H: gl.constexpr, WIDTH: gl.constexpr, H_STRIDE: gl.constexpr,
    TOKENS: gl.constexpr, EXTRA: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr, PROMOTE: gl.constexpr,
    BLOCKS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    X_LAYOUT: gl.constexpr,
):  # fmt: skip
    """``h[r] = swiglu(x[rows[r]] @ w13[expert of r]^T * scales) * inverse_scale`` for every tile of a `RoutePlan`.

    w_desc: boxes ``[1, ROWS / 16, 2, 8, BLOCK_K]`` of w13 seen as ``[E, WIDTH / 8, 2, 8, H]``. up_scale: fp32
    ``[E, 2]``; inverse_scale: fp32 ``[1]``; token_scale: fp32 ``[T]`` or None. h has rows of H_STRIDE elements. The
    plan's tiles have TOKENS + EXTRA rows; EXTRA is 0 or, without PROMOTE, 64. BLOCKS: up_scale ``[E, 2 * WIDTH / 128,
    H / 128]`` and token_scale ``[T, H / 128]`` are of blocks, h is bf16 and inverse 1.
    """
    GROUPS: gl.constexpr = w_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[4]
    x_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, TOKENS, BLOCK_K], X_LAYOUT)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES * WGS, 1, GROUPS, 2, 8, BLOCK_K], w_desc.layout)
    full, empty = make_barriers(STAGES, 129, WGS)
    ring = (x_bufs, w_bufs, full, empty)
    extra_ring = ring
    if EXTRA > 0:
        extra_ring = (gl.allocate_shared_memory(w_desc.dtype, [STAGES, EXTRA, BLOCK_K], X_LAYOUT), w_bufs, full, empty)
    scale_bufs = x_bufs
    if BLOCKS:
        scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles_n: gl.constexpr = WIDTH // (GROUPS * 8 * WGS)
    tiles_k: gl.constexpr = H // BLOCK_K
    launch_next()
    wait_for_last()
    scales = (up_scale_ptr, inverse_scale_ptr, token_scale_ptr)
    target = (h_ptr, H_STRIDE)
    problem = (gl.load(tile_count_ptr) * tiles_n, tiles_n, tiles_k)
    token_rows = (rows_ptr, tiles_ptr)
    rings = (ring, extra_ring, scale_bufs)
    if WGS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, token_rows, target, scales, rings, problem, WIDTH, EXTRA, STAGES, WGS, PROMOTE, BLOCKS)),
                (_consume, (1, token_rows, target, scales, rings, problem, WIDTH, EXTRA, STAGES, WGS, PROMOTE, BLOCKS)),
                (_produce, (x_ptr, x_stride, w_desc, token_scale_ptr, token_rows, rings, problem,
                            EXTRA, STAGES, WGS, BLOCKS)),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, token_rows, target, scales, rings, problem, WIDTH, EXTRA, STAGES, WGS, PROMOTE, BLOCKS)),
                (_consume, (1, token_rows, target, scales, rings, problem, WIDTH, EXTRA, STAGES, WGS, PROMOTE, BLOCKS)),
                (_consume, (2, token_rows, target, scales, rings, problem, WIDTH, EXTRA, STAGES, WGS, PROMOTE, BLOCKS)),
                (_produce, (x_ptr, x_stride, w_desc, token_scale_ptr, token_rows, rings, problem,
                            EXTRA, STAGES, WGS, BLOCKS)),
            ],
            [4, 4, 4],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
