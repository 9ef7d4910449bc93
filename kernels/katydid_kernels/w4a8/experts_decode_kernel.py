"""Routed experts of packed int4 for few tokens each: gate-up, SwiGLU, down and, for the fewest, the weighted sum in one
persistent launch.

Such a batch is bound by reading each hit expert's weights once, so the kernel is one stream of weight tiles without a
break: every CTA takes its share of the gate-up tiles, then of the down tiles (`gemm.experts_order`). One warp streams
weights and never waits for anything but room in the ring. Token rows are copied by a warpgroup beside it; for a down
tile, whose rows of h stand together, it asks the copy engine once the gate-up tiles of its expert are counted. The sum
waits for all down tiles. Counters are zero between calls.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from katydid_kernels.gemm.expert_tiles import gather, row_layout, scaled_swiglu, store_columns, tokens_of
from katydid_kernels.gemm.experts_order import count, down_share, nth_item, wait_for_count
from katydid_kernels.gemm.experts_sum import piece_layout, routes_of, sum_choices
from katydid_kernels.gemm.ring import advance, launch_next, make_barriers, wait_for_last
from katydid_kernels.w4a8.packed_tiles import (
    copy_groups,
    fetch_weights,
    flush_groups,
    multiply_packed,
    strip_of,
    weight_buffers,
)

__all__ = ["experts_decode_w4a8_kernel"]


@gluon.jit
def _rows_of(tile, tiles_ptr):
    """First row of a tile and end of its expert's rows."""
    return gl.load(tiles_ptr + tile * 4 + 1), gl.load(tiles_ptr + tile * 4 + 2)


@gluon.jit
def _fetch(weight, expert, tile, k, bar, ring, stage, WGS: gl.constexpr):
    codes_desc, scales_desc, strips, groups = weight
    mbarrier.expect(bar, WGS * (codes_desc.block_type.nbytes + scales_desc.block_type.nbytes))
    for part in gl.static_range(WGS):
        strip = strip_of(expert, tile * WGS + part, strips)
        fetch_weights(codes_desc, scales_desc, strip, k, groups, bar, ring[1], ring[2], stage * WGS + part)


@gluon.jit
def _stream_weights(
    w13, w2, tiles_ptr, ring, shape, H: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr
):
    full, empty = ring[3], ring[4]
    tiles, up_n, down_n, up_k, down_k = shape
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), tiles * up_n, gl.num_programs(0)):
        expert = gl.load(tiles_ptr + item // up_n * 4)
        for k in range(up_k):
            mbarrier.wait(empty.index(stage), phase)
            _fetch(w13, expert, item % up_n, k, full.index(stage), ring, stage, WGS)
            stage, phase = advance(stage, phase, STAGES)
    share = down_share(tiles, up_n, down_n, H, WIDTH)
    for nth in range(share[0]):
        item = nth_item(nth, share)
        expert = gl.load(tiles_ptr + item // down_n * 4)
        for k in range(down_k):
            mbarrier.wait(empty.index(stage), phase)
            _fetch(w2, expert, item % down_n, k, full.index(stage), ring, stage, WGS)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _copy_tokens(
    x, h_desc, plan, ring, shape, H: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr,
    LAG: gl.constexpr,
):  # fmt: skip
    rows_ptr, tiles_ptr, ready_ptr = plan
    x_ptr, x_stride = x
    x_bufs, full, empty = ring[0], ring[3], ring[4]
    tiles, up_n, down_n, up_k, down_k = shape
    layout: gl.constexpr = row_layout(128, 8)
    cols = gl.arange(0, 128, gl.SliceLayout(0, layout))
    lane = gl.arange(0, x_bufs.type.shape[1], gl.SliceLayout(1, layout))
    stage = 0
    phase = 1
    sent = 0
    for item in range(gl.program_id(0), tiles * up_n, gl.num_programs(0)):
        row, end = _rows_of(item // up_n, tiles_ptr)
        valid = (row + lane < end)[:, None]
        source = gather(x_ptr, tokens_of(row + lane, end, rows_ptr, 1), x_stride, cols)
        for k in range(up_k):
            mbarrier.wait(empty.index(stage), phase)
            sent = copy_groups(x_bufs, full, stage, sent, source, k, H, valid, STAGES, LAG)
            stage, phase = advance(stage, phase, STAGES)
    flush_groups(full, stage, sent, STAGES, LAG)
    share = down_share(tiles, up_n, down_n, H, WIDTH)
    known = -1
    for nth in range(share[0]):
        tile = nth_item(nth, share) // down_n
        row = gl.load(tiles_ptr + tile * 4 + 1)
        if tile != known:
            wait_for_count(ready_ptr + tile, up_n * WGS)
            known = tile
        for k in range(down_k):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, 2 * h_desc.block_type.nbytes)
            for group in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    h_desc, [row, k * 256 + group * 128], bar, x_bufs.index(stage * 2 + group)
                )
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _consume(
    WHO: gl.constexpr, plan, hidden, result, scales, sync_ptr, ring, shape, H: gl.constexpr, WIDTH: gl.constexpr,
    TOP_K: gl.constexpr, PADDED: gl.constexpr, SUM: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr,
    SCALE_A_TOKEN: gl.constexpr,
):  # fmt: skip
    rows_ptr, tiles_ptr, ready_ptr = plan
    h_ptr, h_stride = hidden
    x_scale_ptr, h_scale_ptr = scales
    tiles, up_n, down_n, up_k, down_k = shape
    TOKENS: gl.constexpr = ring[0].type.shape[1]
    h_layout: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    stage = 0
    phase = 0
    h_scale = gl.load(h_scale_ptr)
    gate_scale = 512.0
    if not SCALE_A_TOKEN:
        gate_scale = 512.0 * gl.load(x_scale_ptr)
    for item in range(gl.program_id(0), tiles * up_n, gl.num_programs(0)):
        # Loaded here, the tile's numbers arrive while it multiplies.
        row, end = _rows_of(item // up_n, tiles_ptr)
        acc, stage, phase = multiply_packed(WHO, ring, stage, phase, up_k, TOKENS, STAGES, WGS)
        token_scale_ptr = x_scale_ptr if SCALE_A_TOKEN else None
        h = scaled_swiglu(acc, gate_scale, gate_scale / h_scale, row, end, token_scale_ptr, rows_ptr, TOP_K)
        store_columns(h, h_ptr, h_stride, row, end, (item % up_n * WGS + WHO) * 32, h_layout)
        count(ready_ptr + item // up_n)
    scale = 512.0 * h_scale
    share = down_share(tiles, up_n, down_n, H, WIDTH)
    for nth in range(share[0]):
        item = nth_item(nth, share)
        row, end = _rows_of(item // down_n, tiles_ptr)
        acc, stage, phase = multiply_packed(WHO, ring, stage, phase, down_k, TOKENS, STAGES, WGS)
        _store_tile(acc * scale, row, end, item % down_n * WGS + WHO, result[0], H)
    if SUM > 0:
        count(sync_ptr)
        wait_for_count(sync_ptr, gl.num_programs(0) * WGS)
        _combine(WHO, result, H, TOP_K, PADDED, WGS, SUM)
    gl.thread_barrier()
    if gl.atomic_add(sync_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) * WGS - 1:
        lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        for first in range(0, tiles, 128):
            i = first + gl.arange(0, 128, lanes)
            gl.store(ready_ptr + i, gl.zeros([128], gl.int32, lanes), mask=i < tiles)
        gl.store(sync_ptr, 0)
        gl.store(sync_ptr + 1, 0)


@gluon.jit
def _store_tile(acc, row, end, strip, y_ptr, H: gl.constexpr):
    """A strip of the rows of a tile, in bf16."""
    TOKENS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    if TOKENS <= 16:
        # Straight from the accumulator: through shared memory it would be wider stores, and two barriers a tile.
        rows = row + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
        cols = strip * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        target = y_ptr + rows.to(gl.int64)[None, :] * H + cols[:, None]
        gl.store(target, acc.to(gl.bfloat16), mask=(rows < end)[None, :])
    else:
        store_columns(acc, y_ptr, H, row, end, strip * 64, gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))


@gluon.jit
def _combine(
    WHO: gl.constexpr, result, H: gl.constexpr, TOP_K: gl.constexpr, PADDED: gl.constexpr, WGS: gl.constexpr,
    SUM: gl.constexpr,
):  # fmt: skip
    """The weighted sum of `gemm.combine`, in pieces of SUM tokens' rows over all warpgroups of the GPU."""
    y_ptr, slots_ptr, weights_ptr, shared_ptr, out_ptr, tokens = result
    PIECE: gl.constexpr = 256 if H % 256 == 0 else 128
    PIECES: gl.constexpr = H // PIECE
    TOKENS: gl.constexpr = SUM * (256 // PIECE)
    layout: gl.constexpr = piece_layout(PIECE)
    line = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    column = gl.arange(0, PIECE, gl.SliceLayout(0, layout))
    items = gl.cdiv(tokens, TOKENS) * PIECES
    for item in range(gl.program_id(0) * WGS + WHO, items, gl.num_programs(0) * WGS):
        col = item % PIECES * PIECE + column
        token = item // PIECES * TOKENS + line
        slots, weights = routes_of(item // PIECES, slots_ptr, weights_ptr, tokens, PIECE, TOKENS, TOP_K, PADDED)
        total = sum_choices(y_ptr, H, col, slots, weights, PIECE, TOP_K)
        target = token.to(gl.int64)[:, None] * H + col[None, :]
        there = (token < tokens)[:, None] & (col < H)[None, :]
        if shared_ptr is not None:
            total += gl.load(shared_ptr + target, mask=there, other=0.0).to(gl.float32)
        gl.store(out_ptr + target, total.to(out_ptr.dtype.element_ty), mask=there)


@gluon.jit(do_not_specialize=["tokens"])
def experts_decode_w4a8_kernel(
    x_ptr, x_stride, codes13_desc, scales13_desc, codes2_desc, scales2_desc, h_desc, h_ptr, h_stride, y_ptr,
    weights_ptr, shared_ptr, out_ptr, rows_ptr, slots_ptr, tiles_ptr, tile_count_ptr, ready_ptr, sync_ptr,
    x_scale_ptr, h_scale_ptr, tokens,
    H: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PADDED: gl.constexpr, SUM: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, SCALE_A_TOKEN: gl.constexpr, X_LAYOUT: gl.constexpr,
):  # fmt: skip
    """``out[t] = sum over j of weights[t, j] * w2[e] swiglu(w13[e] x[t]) + shared[t]``, e the expert of pair (t, j).

    Descriptors are `launch.weight_descriptors`' of the packed w13, gated, and w2. h: e4m3 ``[pairs, *]``, rows padded
    with zeros to a multiple of 256, and its boxes ``[TOKENS, 128]``; y: bf16 ``[pairs, H]``; ready: int32 zeros, one a
    tile; sync: two zeros. Rows, slots and tiles are a `RoutePlan`'s. PADDED: TOP_K rounded up to a power of two; SUM:
    tokens whose rows are summed at a time, 4 or 8; with 0 the kernel ends with y. x_scale: fp32 ``[T]`` where
    SCALE_A_TOKEN, else one.
    """
    WGS: gl.constexpr = 2
    x_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, TOKENS, 128], X_LAYOUT)
    codes, code_scales = weight_buffers(codes13_desc, scales13_desc, STAGES, WGS)
    full, empty = make_barriers(STAGES, 2, WGS)
    launch_next()
    # Launched while the plan is still being made: everything it wrote is read after this.
    wait_for_last()
    tiles = gl.load(tile_count_ptr)
    plan = (rows_ptr, tiles_ptr, ready_ptr)
    hidden = (h_ptr, h_stride)
    result = (y_ptr, slots_ptr, weights_ptr, shared_ptr, out_ptr, tokens)
    ring = (x_bufs, codes, code_scales, full, empty)
    shape = (tiles, WIDTH // 64, H // 128, (H + 255) // 256, (WIDTH + 255) // 256)
    scales = (x_scale_ptr, h_scale_ptr)
    w13 = (codes13_desc, scales13_desc, WIDTH // 32, H // 128)
    w2 = (codes2_desc, scales2_desc, H // 64, (WIDTH + 127) // 128)
    gl.warp_specialize(
        [
            (_consume, (0, plan, hidden, result, scales, sync_ptr, ring, shape, H, WIDTH, TOP_K, PADDED, SUM, STAGES,
                        WGS, SCALE_A_TOKEN)),
            (_consume, (1, plan, hidden, result, scales, sync_ptr, ring, shape, H, WIDTH, TOP_K, PADDED, SUM, STAGES,
                        WGS, SCALE_A_TOKEN)),
            (_copy_tokens, ((x_ptr, x_stride), h_desc, plan, ring, shape, H, WIDTH, STAGES, WGS, 3)),
            (_stream_weights, (w13, w2, tiles_ptr, ring, shape, H, WIDTH, STAGES, WGS)),
        ],
        [4, 4, 1],
        [200, 72, 40],
    )  # fmt: skip
