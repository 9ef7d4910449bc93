"""Routed experts for few tokens: gate-up, SwiGLU, down and the weighted sum in one persistent launch.

Such a batch is bound by reading each hit expert's weights once, so the kernel is one stream of weight tiles without a
break: every CTA takes its share of the gate-up tiles, then of the down tiles, and its producer goes on fetching weights
across the border and across items. A down tile waits only for its own tokens' h, which all gate-up tiles of its expert
count up; the sum waits for all down tiles. The CTAs (never more than fit the GPU at once) thus depend on each other
only backwards in this order, and cannot wait in a circle. Counters are zero between calls: the last CTA out resets
them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from katydid_kernels.gemm.expert_tiles import (
    copy_rows,
    gather,
    multiply,
    row_layout,
    scaled_swiglu,
    store_columns,
    tokens_of,
)
from katydid_kernels.gemm.ring import advance, make_barriers, wait_for_last

__all__ = ["experts_decode_kernel"]


@gluon.jit
def _wait_for(counter_ptr, count):
    """Spin until the counter has reached `count`; what was written before it was counted is then visible."""
    seen = 0
    while seen < count:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _count(counter_ptr):
    """Publish what this warpgroup has stored."""
    gl.thread_barrier()
    gl.atomic_add(counter_ptr, 1, sem="release")


@gluon.jit
def _tile_rows(tile, plan):
    """Expert, first row and end of the rows of a tile. Without a plan every pair is a tile of one row, or of none where
    its expert is not local."""
    _, tiles_ptr, _, ids_ptr, first_expert, experts = plan
    if tiles_ptr is None:
        expert = gl.load(ids_ptr + tile) - first_expert
        local = (expert >= 0) & (expert < experts)
        expert = gl.where(local, expert, 0)
        row = tile
        end = gl.where(local, tile + 1, tile)
    else:
        expert = gl.load(tiles_ptr + tile * 4)
        row = gl.load(tiles_ptr + tile * 4 + 1)
        end = gl.load(tiles_ptr + tile * 4 + 2)
    return expert, row, end


@gluon.jit
def _down_share(up_items, down_items, exchange):
    """The down tiles of this CTA, first and end. Gate-up tiles are dealt round robin; a CTA that got one fewer takes
    `exchange` more down tiles, which is how many take the time of one; evenly where none has more than one, because
    then all down tiles wait for those."""
    ctas = gl.num_programs(0)
    exchange = gl.where(up_items <= ctas, 0, exchange)
    me = gl.program_id(0)
    longer = up_items % ctas
    shorter = gl.where(longer == 0, 0, ctas - longer)
    extra = gl.minimum(exchange, down_items // gl.maximum(shorter, 1))
    even = down_items - shorter * extra
    begin = even * me // ctas + gl.where(longer == 0, 0, gl.maximum(me - longer, 0)) * extra
    end = even * (me + 1) // ctas + gl.where(longer == 0, 0, gl.maximum(me + 1 - longer, 0)) * extra
    return begin, end


@gluon.jit
def _produce(
    x_ptr, x_stride, w13_desc, w2_desc, plan, hidden, ring, shape,
    TOP_K: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr,
):  # fmt: skip
    rows_ptr, _, ready_ptr, _, _, _ = plan
    h_ptr, h_stride = hidden
    x_bufs, w_bufs, full, empty = ring
    tiles, up_n, down_n, up_k, down_k = shape
    TOKENS: gl.constexpr = x_bufs.type.shape[1]
    BLOCK_K: gl.constexpr = x_bufs.type.shape[2]
    GROUPS: gl.constexpr = w13_desc.block_type.shape[1]
    layout: gl.constexpr = row_layout(BLOCK_K, x_bufs.dtype.primitive_bitwidth)
    cols = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    lane = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), tiles * up_n, gl.num_programs(0)):
        expert, row, end = _tile_rows(item // up_n, plan)
        valid = (row + lane < end)[:, None]
        source = gather(x_ptr, tokens_of(row + lane, end, rows_ptr, TOP_K), x_stride, cols)
        for k in range(up_k):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, WGS * w13_desc.block_type.nbytes)
            for part in gl.static_range(WGS):
                group = (item % up_n * WGS + part) * GROUPS
                tma.async_copy_global_to_shared(
                    w13_desc, [expert, group, 0, 0, k * BLOCK_K], bar, w_bufs.index(stage * WGS + part)
                )
            copy_rows(x_bufs.index(stage), source + k * BLOCK_K, valid, bar)
            stage, phase = advance(stage, phase, STAGES)

    begin, finish = _down_share(tiles * up_n, tiles * down_n, up_k // down_k)
    known = -1
    for item in range(begin, finish):
        tile = item // down_n
        expert, row, end = _tile_rows(tile, plan)
        valid = (row + lane < end)[:, None]
        source = gather(h_ptr, row + lane, h_stride, cols)
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
            if tile != known:
                _wait_for(ready_ptr + tile, up_n * WGS)
                known = tile
            copy_rows(x_bufs.index(stage), source + k * BLOCK_K, valid, bar)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _consume(
    WHO: gl.constexpr, plan, hidden, result, scales, ring, shape, H: gl.constexpr, TOP_K: gl.constexpr,
    STAGES: gl.constexpr, WGS: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    rows_ptr, _, ready_ptr, _, _, _ = plan
    h_ptr, h_stride = hidden
    y_ptr, _, _, _, _, sync_ptr, _ = result
    x_bufs, w_bufs, _, _ = ring
    tiles, up_n, down_n, up_k, down_k = shape
    up_scale_ptr, inverse_scale, down_scale_ptr, token_scale_ptr = scales
    TOKENS: gl.constexpr = x_bufs.type.shape[1]
    ROWS: gl.constexpr = w_bufs.type.shape[2] * 16
    h_layout: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 16, 512 // ROWS], [1, 4], [0, 1])
    y_layout: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, 4], [0, 1])
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), tiles * up_n, gl.num_programs(0)):
        # Loaded here, the tile's numbers arrive while it multiplies.
        expert, row, end = _tile_rows(item // up_n, plan)
        scale = up_scale_ptr + expert * 2
        gate_scale = gl.load(scale)
        up_scale = gl.load(scale + 1) * inverse_scale
        acc, stage, phase = multiply(WHO, ring, stage, phase, up_k, ROWS, TOKENS, STAGES, WGS, PROMOTE, True)
        h = scaled_swiglu(acc, gate_scale, up_scale, row, end, token_scale_ptr, rows_ptr, TOP_K)
        store_columns(h, h_ptr, h_stride, row, end, (item % up_n * WGS + WHO) * (ROWS // 2), h_layout)
        _count(ready_ptr + item // up_n)

    begin, finish = _down_share(tiles * up_n, tiles * down_n, up_k // down_k)
    for item in range(begin, finish):
        expert, row, end = _tile_rows(item // down_n, plan)
        scale = gl.load(down_scale_ptr + expert)
        acc, stage, phase = multiply(WHO, ring, stage, phase, down_k, ROWS, TOKENS, STAGES, WGS, PROMOTE, True)
        col = (item % down_n * WGS + WHO) * ROWS
        store_columns(acc * scale, y_ptr, H, row, end, col, y_layout)

    _count(sync_ptr)
    _wait_for(sync_ptr, gl.num_programs(0) * WGS)
    _combine(WHO, plan, result, H, TOP_K, WGS)
    gl.thread_barrier()
    if gl.atomic_add(sync_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) * WGS - 1:
        lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        for first in range(0, tiles, 128):
            i = first + gl.arange(0, 128, lanes)
            gl.store(ready_ptr + i, gl.zeros([128], gl.int32, lanes), mask=i < tiles)
        gl.store(sync_ptr, 0)
        gl.store(sync_ptr + 1, 0)


@gluon.jit
def _combine(WHO: gl.constexpr, plan, result, H: gl.constexpr, TOP_K: gl.constexpr, WGS: gl.constexpr):
    """The weighted sum of `combine.combine`, in pieces of a row over all warpgroups of the GPU."""
    y_ptr, slots_ptr, weights_ptr, shared_ptr, out_ptr, _, tokens = result
    _, _, _, ids_ptr, first_expert, experts = plan
    PIECE: gl.constexpr = 512 if H % 512 == 0 else 128
    PIECES: gl.constexpr = H // PIECE
    line: gl.constexpr = gl.BlockedLayout([PIECE // 128], [32], [4], [0])
    lane = gl.arange(0, PIECE, line)
    for item in range(gl.program_id(0) * WGS + WHO, tokens * PIECES, gl.num_programs(0) * WGS):
        token = item // PIECES
        col = item % PIECES * PIECE + lane
        total = gl.zeros([PIECE], gl.float32, line)
        for j in gl.static_range(TOP_K):
            if slots_ptr is None:
                expert = gl.load(ids_ptr + token * TOP_K + j) - first_expert
                slot = gl.where((expert >= 0) & (expert < experts), token * TOP_K + j, -1)
            else:
                slot = gl.load(slots_ptr + token * TOP_K + j)
            weight = gl.load(weights_ptr + token * TOP_K + j)
            # A row nobody wrote may hold NaN: it is left out, not multiplied by zero.
            part = gl.load(y_ptr + gl.maximum(slot, 0).to(gl.int64) * H + col)
            total += gl.where(slot >= 0, weight * part.to(gl.float32), 0.0)
        if shared_ptr is not None:
            total += gl.load(shared_ptr + token.to(gl.int64) * H + col).to(gl.float32)
        gl.store(out_ptr + token.to(gl.int64) * H + col, total.to(out_ptr.dtype.element_ty))


@gluon.jit(do_not_specialize=["tokens", "first_expert", "experts"])
def experts_decode_kernel(
    x_ptr, x_stride, w13_desc, w2_desc, h_ptr, h_stride, y_ptr, weights_ptr, shared_ptr, out_ptr,
    ids_ptr, first_expert, experts, rows_ptr, slots_ptr, tiles_ptr, tile_count_ptr, ready_ptr, sync_ptr,
    up_scale_ptr, inverse_scale_ptr, down_scale_ptr, token_scale_ptr, tokens,
    H: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    WGS: gl.constexpr, PROMOTE: gl.constexpr, X_LAYOUT: gl.constexpr,
):  # fmt: skip
    """``out[t] = sum over j of weights[t, j] * w2[e] swiglu(w13[e] x[t]) + shared[t]``, e the expert of pair (t, j).

    w13_desc: boxes ``[1, ROWS / 16, 2, 8, BLOCK_K]`` of w13 seen as ``[E, WIDTH / 8, 2, 8, H]``; w2_desc: boxes
    ``[1, ROWS / 8, 8, BLOCK_K]`` of w2 seen as ``[E, H / 8, 8, WIDTH]``. h: ``[pairs, WIDTH]``, rows padded with zeros
    to a multiple of BLOCK_K; y: ``[pairs, H]``; ready: zeros, an int32 a tile; sync: two zeros. Rows, slots and tiles
    are a `RoutePlan`'s, or None where few pairs share an expert: then every pair is a tile. Scales in fp32: up
    ``[E, 2]``, down ``[E]``, inverse ``[1]`` (what h is multiplied by), token ``[T]`` or None.
    """
    GROUPS: gl.constexpr = w13_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = w13_desc.block_type.shape[4]
    x_bufs = gl.allocate_shared_memory(w13_desc.dtype, [STAGES, TOKENS, BLOCK_K], X_LAYOUT)
    w_bufs = gl.allocate_shared_memory(w13_desc.dtype, [STAGES * WGS, 1, GROUPS, 2, 8, BLOCK_K], w13_desc.layout)
    full, empty = make_barriers(STAGES, 129, WGS)
    up_n = WIDTH // (GROUPS * 8 * WGS)
    down_n = H // (GROUPS * 16 * WGS)
    up_k = H // BLOCK_K
    down_k = (WIDTH + BLOCK_K - 1) // BLOCK_K
    # Launched while the plan is still being made: everything it wrote is read after this.
    wait_for_last()
    tiles = tokens * TOP_K if tile_count_ptr is None else gl.load(tile_count_ptr)
    scales = (up_scale_ptr, gl.load(inverse_scale_ptr), down_scale_ptr, token_scale_ptr)
    plan = (rows_ptr, tiles_ptr, ready_ptr, ids_ptr, first_expert, experts)
    hidden = (h_ptr, h_stride)
    result = (y_ptr, slots_ptr, weights_ptr, shared_ptr, out_ptr, sync_ptr, tokens)
    ring = (x_bufs, w_bufs, full, empty)
    shape = (tiles, up_n, down_n, up_k, down_k)
    if WGS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, plan, hidden, result, scales, ring, shape, H, TOP_K, STAGES, WGS, PROMOTE)),
                (_produce, (x_ptr, x_stride, w13_desc, w2_desc, plan, hidden, ring, shape, TOP_K, STAGES, WGS)),
            ],
            [4],
            [104],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, plan, hidden, result, scales, ring, shape, H, TOP_K, STAGES, WGS, PROMOTE)),
                (_consume, (1, plan, hidden, result, scales, ring, shape, H, TOP_K, STAGES, WGS, PROMOTE)),
                (_produce, (x_ptr, x_stride, w13_desc, w2_desc, plan, hidden, ring, shape, TOP_K, STAGES, WGS)),
            ],
            [4, 4],
            [200, 104],
        )
