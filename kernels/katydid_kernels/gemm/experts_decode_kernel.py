"""Routed experts for few tokens: gate-up, SwiGLU, down and, for the fewest, the weighted sum in one persistent launch.

Such a batch is bound by reading each hit expert's weights once, so the kernel is one stream of weight tiles without a
break: every CTA takes its share of the gate-up tiles, then of the down tiles (`experts_order`). One warp streams the
weights and never waits for anything but room in the ring; a warpgroup beside it copies the token rows to each stage,
for a down tile (whose rows of h stand together) once all gate-up tiles of its expert are counted. The sum waits for all
down tiles. Counters are zero between calls: the last CTA out resets them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from katydid_kernels.gemm.expert_tiles import (
    copy_rows,
    copy_scales,
    gather,
    multiply,
    multiply_blocks,
    row_layout,
    scaled_swiglu,
    store_columns,
    tokens_of,
)
from katydid_kernels.gemm.experts_blocks import finish_block
from katydid_kernels.gemm.experts_order import count, down_share, nth_item, wait_for_count
from katydid_kernels.gemm.experts_pairs import even_column, multiply_pairs, stream_pairs
from katydid_kernels.gemm.experts_sum import piece_layout, routes_of, sum_choices
from katydid_kernels.gemm.ring import advance, launch_next, make_barriers, wait_for_last

__all__ = ["experts_decode_kernel"]


@gluon.constexpr_function
def _power_of_two(n):
    """The next one."""
    return 1 << (n - 1).bit_length()


@gluon.jit
def _rows_of(tile, tiles_ptr):
    """First row of a tile and end of its expert's rows."""
    return gl.load(tiles_ptr + tile * 4 + 1), gl.load(tiles_ptr + tile * 4 + 2)


@gluon.jit
def _stream_weights(
    w13_desc, w2_desc, tiles_ptr, ring, shape,
    H: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    _, w_bufs, full, empty = ring
    tiles, up_n, down_n, up_k, down_k = shape
    GROUPS: gl.constexpr = w13_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = w13_desc.block_type.shape[4]
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), tiles * up_n, gl.num_programs(0)):
        expert = gl.load(tiles_ptr + item // up_n * 4)
        for k in range(up_k):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, WGS * w13_desc.block_type.nbytes)
            for part in gl.static_range(WGS):
                group = (item % up_n * WGS + part) * GROUPS
                tma.async_copy_global_to_shared(
                    w13_desc, [expert, group, 0, 0, k * BLOCK_K], bar, w_bufs.index(stage * WGS + part)
                )
            stage, phase = advance(stage, phase, STAGES)
    share = down_share(tiles, up_n, down_n, H, WIDTH)
    for nth in range(share[0]):
        item = nth_item(nth, share)
        expert = gl.load(tiles_ptr + item // down_n * 4)
        if PAIRED:
            stage, phase = stream_pairs(w2_desc, expert, item % down_n, ring, stage, phase, STAGES)
        else:
            for k in range(down_k):
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, WGS * w2_desc.block_type.nbytes)
                for part in gl.static_range(WGS):
                    group = (item % down_n * WGS + part) * (2 * GROUPS)
                    tma.async_copy_global_to_shared(
                        w2_desc, [expert, group, 0, k * BLOCK_K], bar,
                        w_bufs.index(stage * WGS + part).reshape([1, 2 * GROUPS, 8, BLOCK_K]),
                    )  # fmt: skip
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _copy_tokens(
    x_ptr, x_stride, h_desc, plan, token_scale_ptr, blocks, ring, shape, H: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, WGS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    rows_ptr, tiles_ptr, ready_ptr = plan
    scale_bufs, _, h_scale_ptr, _ = blocks
    x_bufs = ring[0]
    full = ring[2]
    empty = ring[3]
    tiles, up_n, down_n, up_k, down_k = shape
    TOKENS: gl.constexpr = x_bufs.type.shape[1]
    BLOCK_K: gl.constexpr = x_bufs.type.shape[2]
    layout: gl.constexpr = row_layout(BLOCK_K, x_bufs.dtype.primitive_bitwidth)
    cols = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    lane = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    line = gl.arange(0, TOKENS, gl.BlockedLayout([1], [32], [4], [0]))
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), tiles * up_n, gl.num_programs(0)):
        row, end = _rows_of(item // up_n, tiles_ptr)
        valid = (row + lane < end)[:, None]
        source = gather(x_ptr, tokens_of(row + lane, end, rows_ptr, 1), x_stride, cols)
        if BLOCKS:
            scales = token_scale_ptr + tokens_of(row + line, end, rows_ptr, 1) * up_k
        for k in range(up_k):
            mbarrier.wait(empty.index(stage), phase)
            if BLOCKS:
                copy_scales(scale_bufs.index(stage), scales + k, row + line < end, None)
                mbarrier.arrive(full.index(stage), count=1)
            copy_rows(x_bufs.index(stage), source + k * BLOCK_K, valid, full.index(stage))
            stage, phase = advance(stage, phase, STAGES)
    share = down_share(tiles, up_n, down_n, H, WIDTH)
    # How often a tile is counted: by every warpgroup for its columns, or once for a block of them.
    done = up_n * WGS // 4 if BLOCKS else up_n * WGS
    known = -1
    for nth in range(share[0]):
        item = nth_item(nth, share)
        tile = item // down_n
        row, end = _rows_of(tile, tiles_ptr)
        if tile != known:
            wait_for_count(ready_ptr + tile, done)
            known = tile
        for k in range(down_k):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            # One arrival with the bytes to come, and those of the threads that have nothing to copy.
            mbarrier.expect(bar, h_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(h_desc, [row, k * BLOCK_K], bar, x_bufs.index(stage))
            if BLOCKS:
                copy_scales(scale_bufs.index(stage), h_scale_ptr + (row + line) * down_k + k, row + line < end, bar)
            else:
                mbarrier.arrive(bar, count=127)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _consume(
    WHO: gl.constexpr, plan, hidden, result, scales, blocks, ring, shape, H: gl.constexpr, WIDTH: gl.constexpr,
    TOP_K: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr, PROMOTE: gl.constexpr, SUM: gl.constexpr,
    BLOCKS: gl.constexpr, PAIRED: gl.constexpr, UP_AT_ONCE: gl.constexpr, DOWN_AT_ONCE: gl.constexpr,
):  # fmt: skip
    rows_ptr, tiles_ptr, ready_ptr = plan
    h_ptr, h_stride = hidden
    y_ptr, _, _, _, _, sync_ptr, _ = result
    scale_bufs, h_wide_ptr, h_scale_ptr, parts_ptr = blocks
    tiles, up_n, down_n, up_k, down_k = shape
    up_scale_ptr, inverse_scale, down_scale_ptr, token_scale_ptr = scales
    TOKENS: gl.constexpr = ring[0].type.shape[1]
    ROWS: gl.constexpr = ring[1].type.shape[2] * 16
    h_layout: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 16, 512 // ROWS], [1, 4], [0, 1])
    y_layout: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, 4], [0, 1])
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), tiles * up_n, gl.num_programs(0)):
        # Loaded here, the tile's numbers arrive while it multiplies.
        tile = item // up_n
        row, end = _rows_of(tile, tiles_ptr)
        expert = gl.load(tiles_ptr + tile * 4)
        col = (item % up_n * WGS + WHO) * (ROWS // 2)
        if BLOCKS:
            gate = up_scale_ptr + (expert * (2 * WIDTH // 128) + col // 128) * up_k
            acc, stage, phase = multiply_blocks(
                WHO, ring, scale_bufs, (gate, gate + WIDTH // 128 * up_k), stage, phase, up_k,
                ROWS, TOKENS, STAGES, WGS, True,
            )  # fmt: skip
            h = scaled_swiglu(acc, 1.0, 1.0, row, end, None, rows_ptr, 1)
            store_columns(h, h_wide_ptr, WIDTH, row, end, col, h_layout)
            part = parts_ptr + tile * (WIDTH // 128) + col // 128
            finish_block(part, ready_ptr + tile, hidden, h_wide_ptr, h_scale_ptr, row, end, col // 128, WIDTH, TOKENS)
        else:
            gate_scale = gl.load(up_scale_ptr + expert * 2)
            up_scale = gl.load(up_scale_ptr + expert * 2 + 1) * inverse_scale
            acc, stage, phase = multiply(
                WHO, ring, stage, phase, up_k, ROWS, TOKENS, STAGES, WGS, PROMOTE, True, UP_AT_ONCE
            )
            h = scaled_swiglu(acc, gate_scale, up_scale, row, end, token_scale_ptr, rows_ptr, 1)
            store_columns(h, h_ptr, h_stride, row, end, col, h_layout)
            count(ready_ptr + tile)

    share = down_share(tiles, up_n, down_n, H, WIDTH)
    for nth in range(share[0]):
        item = nth_item(nth, share)
        row, end = _rows_of(item // down_n, tiles_ptr)
        expert = gl.load(tiles_ptr + item // down_n * 4)
        col = (item % down_n * WGS + WHO) * ROWS
        if BLOCKS:
            scale_row = down_scale_ptr + (expert * (H // 128) + col // 128) * down_k
            acc, stage, phase = multiply_blocks(
                WHO, ring, scale_bufs, (scale_row, scale_row), stage, phase, down_k,
                ROWS, TOKENS, STAGES, WGS, False,
            )  # fmt: skip
        else:
            scale = gl.load(down_scale_ptr + expert)
            if PAIRED:
                acc, stage, phase = multiply_pairs(WHO, ring, stage, phase, ROWS, TOKENS, STAGES)
            else:
                acc, stage, phase = multiply(
                    WHO, ring, stage, phase, down_k, ROWS, TOKENS, STAGES, WGS, PROMOTE, False, DOWN_AT_ONCE
                )
            acc *= scale
        store_columns(acc, y_ptr, H, row, end, col, y_layout)

    if SUM > 0:
        _combine(WHO, result, H, TOP_K, WGS, PAIRED, SUM)
    gl.thread_barrier()
    if gl.atomic_add(sync_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) * WGS - 1:
        lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        for first in range(0, tiles, 128):
            i = first + gl.arange(0, 128, lanes)
            gl.store(ready_ptr + i, gl.zeros([128], gl.int32, lanes), mask=i < tiles)
        gl.store(sync_ptr, 0)
        gl.store(sync_ptr + 1, 0)


@gluon.jit
def _combine(
    WHO: gl.constexpr, result, H: gl.constexpr, TOP_K: gl.constexpr, WGS: gl.constexpr, PAIRED: gl.constexpr,
    SUM: gl.constexpr,
):  # fmt: skip
    """The weighted sum of `combine.combine` once all of y is there, in pieces of SUM tokens' rows over all warpgroups
    of the GPU. Where a piece's rows are is loaded one piece ahead, for the first one while waiting."""
    y_ptr, slots_ptr, weights_ptr, shared_ptr, out_ptr, sync_ptr, tokens = result
    PIECE: gl.constexpr = 256 if H % (512 if PAIRED else 256) == 0 else 128
    # Of rows in pairs a piece is one of the even columns and one of the odd ones.
    PIECES: gl.constexpr = H // (2 * PIECE if PAIRED else PIECE)
    TOKENS: gl.constexpr = SUM * (256 // PIECE)
    PADDED: gl.constexpr = _power_of_two(TOP_K)
    column = gl.arange(0, PIECE, gl.SliceLayout(0, piece_layout(PIECE)))
    items = gl.cdiv(tokens, TOKENS) * PIECES
    step = gl.num_programs(0) * WGS
    first = gl.program_id(0) * WGS + WHO
    slots, weights = routes_of(first // PIECES, slots_ptr, weights_ptr, tokens, PIECE, TOKENS, TOP_K, PADDED)
    count(sync_ptr)
    wait_for_count(sync_ptr, step)
    for item in range(first, items, step):
        if PAIRED:
            place = item % PIECES * (2 * PIECE) + even_column(column)
            even = sum_choices(y_ptr, H, place, slots, weights, PIECE, TOP_K)
            odd = sum_choices(y_ptr, H, place + 64, slots, weights, PIECE, TOP_K)
            total = gl.join(even, odd).reshape([TOKENS, 2 * PIECE])
        else:
            total = sum_choices(y_ptr, H, item % PIECES * PIECE + column, slots, weights, PIECE, TOP_K)
        slots, weights = routes_of(
            (item + step) // PIECES, slots_ptr, weights_ptr, tokens, PIECE, TOKENS, TOP_K, PADDED
        )
        token = item // PIECES * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, total.type.layout))
        col = item % PIECES * total.shape[1] + gl.arange(0, total.shape[1], gl.SliceLayout(0, total.type.layout))
        target = token.to(gl.int64)[:, None] * H + col[None, :]
        there = (token < tokens)[:, None] & (col < H)[None, :]
        if shared_ptr is not None:
            total += gl.load(shared_ptr + target, mask=there, other=0.0).to(gl.float32)
        gl.store(out_ptr + target, total.to(out_ptr.dtype.element_ty), mask=there)


@gluon.jit(do_not_specialize=["tokens"])
def experts_decode_kernel(
    x_ptr, x_stride, w13_desc, w2_desc, h_desc, h_ptr, h_stride, y_ptr, weights_ptr, shared_ptr, out_ptr,
    rows_ptr, slots_ptr, tiles_ptr, tile_count_ptr, ready_ptr, sync_ptr,
    up_scale_ptr, inverse_scale_ptr, down_scale_ptr, token_scale_ptr, h_wide_ptr, h_scale_ptr, parts_ptr, tokens,
    H: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    WGS: gl.constexpr, PROMOTE: gl.constexpr, SUM: gl.constexpr, BLOCKS: gl.constexpr, PAIRED: gl.constexpr,
    X_LAYOUT: gl.constexpr,
):  # fmt: skip
    """``out[t] = sum over j of weights[t, j] * w2[e] swiglu(w13[e] x[t]) + shared[t]``, e the expert of pair (t, j).

    w13_desc: boxes ``[1, ROWS / 16, 2, 8, BLOCK_K]`` of w13 seen as ``[E, WIDTH / 8, 2, 8, H]``; w2_desc: boxes
    ``[1, ROWS / 8, 8, BLOCK_K]`` of w2 seen as ``[E, H / 8, 8, WIDTH]``. h: ``[pairs, WIDTH]``, rows padded with zeros
    to a multiple of BLOCK_K, and its boxes ``[TOKENS, BLOCK_K]``; y: ``[pairs, H]``; ready: zeros, an int32 a tile;
    sync: two zeros. Rows, slots and tiles are a `RoutePlan`'s. Scales in fp32: up ``[E, 2]``, down ``[E]``, inverse
    ``[1]`` (what h is multiplied by), token ``[T]`` or None. WGS is 2. SUM: tokens whose rows are
    summed at a time, 4 or 8; with 0 the kernel ends with y.

    PAIRED: w2 has rows of 192 bytes and is read in pairs of them, see `experts_pairs`: its boxes are of w2 seen as
    ``[E, H / 16, 8, 2 * WIDTH]``, and y has its columns as `experts_pairs` says.

    BLOCKS: scales are of blocks, as `ExpertScales` has them; h_wide: bf16 ``[pairs, WIDTH]``; h_scale: fp32 ``[pairs,
    WIDTH / 128]``; parts: zeros, an int32 for every 128 columns of a tile. Else those three are None.
    """
    GROUPS: gl.constexpr = w13_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = w13_desc.block_type.shape[4]
    x_bufs = gl.allocate_shared_memory(w13_desc.dtype, [STAGES, TOKENS, BLOCK_K], X_LAYOUT)
    w_bufs = gl.allocate_shared_memory(w13_desc.dtype, [STAGES * WGS, 1, GROUPS, 2, 8, BLOCK_K], w13_desc.layout)
    full, empty = make_barriers(STAGES, 130 if BLOCKS else 129, WGS)
    up_n = WIDTH // (GROUPS * 8 * WGS)
    down_n = H // (GROUPS * 16 * WGS)
    up_k: gl.constexpr = H // BLOCK_K
    down_k: gl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    UP_AT_ONCE: gl.constexpr = 2 if TOKENS <= 32 and up_k % 2 == 0 else 1
    DOWN_AT_ONCE: gl.constexpr = 2 if TOKENS <= 32 and down_k % 2 == 0 else 1
    scale_bufs = x_bufs
    if BLOCKS:
        scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    launch_next()
    # Launched while the plan is still being made: everything it wrote is read after this.
    wait_for_last()
    tiles = gl.load(tile_count_ptr)
    scales = (up_scale_ptr, gl.load(inverse_scale_ptr), down_scale_ptr, token_scale_ptr)
    plan = (rows_ptr, tiles_ptr, ready_ptr)
    hidden = (h_ptr, h_stride)
    result = (y_ptr, slots_ptr, weights_ptr, shared_ptr, out_ptr, sync_ptr, tokens)
    blocks = (scale_bufs, h_wide_ptr, h_scale_ptr, parts_ptr)
    ring = (x_bufs, w_bufs, full, empty)
    shape = (tiles, up_n, down_n, up_k, down_k)
    gl.warp_specialize(
        [
            (_consume, (0, plan, hidden, result, scales, blocks, ring, shape,
                        H, WIDTH, TOP_K, STAGES, WGS, PROMOTE, SUM, BLOCKS, PAIRED, UP_AT_ONCE, DOWN_AT_ONCE)),
            (_consume, (1, plan, hidden, result, scales, blocks, ring, shape,
                        H, WIDTH, TOP_K, STAGES, WGS, PROMOTE, SUM, BLOCKS, PAIRED, UP_AT_ONCE, DOWN_AT_ONCE)),
            (_copy_tokens, (x_ptr, x_stride, h_desc, plan, token_scale_ptr, blocks, ring, shape,
                            H, WIDTH, STAGES, WGS, BLOCKS)),
            (_stream_weights, (w13_desc, w2_desc, tiles_ptr, ring, shape, H, WIDTH, STAGES, WGS, PAIRED)),
        ],
        [4, 4, 1],
        [168, 104, 40],
    )  # fmt: skip
