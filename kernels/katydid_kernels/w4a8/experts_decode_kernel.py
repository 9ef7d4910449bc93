"""Routed experts of packed int4 for few tokens: gate-up, SwiGLU, down and the weighted sum in one persistent launch.

Such a batch is bound by reading each hit expert's weights once, so what fetches them never waits for anything but room
in the ring: first this CTA's equal share of all gate-up stages (a tile cut in two or more is summed by whoever finishes
it last, in the order of K), then its share of the down tiles, which are on their way while the last h is still being
made. Token rows come from a producer of their own, which before the first h waits until every gate-up tile of the GPU
is done; the weighted sum waits for all down tiles. The CTAs (never more than fit the GPU at once) depend on each other
only backwards in this order, and cannot wait in a circle. Counters are zero between calls.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from katydid_kernels.gemm.expert_tiles import gather, row_layout, scaled_swiglu, store_columns, tokens_of
from katydid_kernels.gemm.ring import advance, launch_next, make_barriers, wait_for_last
from katydid_kernels.gemm.stream_k import interval_of, stages_within, sum_parts, tiles_of
from katydid_kernels.w4a8.decode_order import count, down_share, expert_of, rows_of, wait_for
from katydid_kernels.w4a8.decode_sums import combine_rows, store_tile, sum_token
from katydid_kernels.w4a8.packed_tiles import (
    copy_groups,
    copy_stage,
    fetch_weights,
    flush_groups,
    multiply_packed,
    strip_of,
    weight_buffers,
)

__all__ = ["experts_decode_w4a8_kernel"]


@gluon.jit
def _produce_weights(
    w13, w2, plan, ring, shape, interval, RUN: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr
):  # fmt: skip
    full, empty = ring[3], ring[4]
    up_n, down_n, up_k, down_k = shape[1:]
    codes13_desc, scales13_desc, strips13, groups13 = w13
    codes2_desc, scales2_desc, strips2, groups2 = w2
    BYTES: gl.constexpr = WGS * (codes13_desc.block_type.nbytes + scales13_desc.block_type.nbytes)
    stage = 0
    phase = 1
    wait_for_last()
    first, last = tiles_of(interval, up_k)
    for item in range(first, last):
        expert = expert_of(item // up_n, plan)
        first_k, last_k = stages_within(item, interval, up_k)
        for k in range(first_k, last_k):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, BYTES)
            for part in gl.static_range(WGS):
                strip = strip_of(expert, item % up_n * WGS + part, strips13)
                fetch_weights(
                    codes13_desc, scales13_desc, strip, k, groups13, bar, ring[1], ring[2], stage * WGS + part
                )
            stage, phase = advance(stage, phase, STAGES)
    first, last = down_share(shape, strips2, RUN)
    for item in range(first, last):
        for j in range(0, RUN, 2):
            if RUN == 1:
                expert = expert_of(item // down_n, plan)
                first_strip = strip_of(expert, item % down_n * WGS, strips2)
                second_strip = strip_of(expert, item % down_n * WGS + 1, strips2)
            else:
                pair = item // strips2 * RUN + j
                first_strip = strip_of(expert_of(pair, plan), item % strips2, strips2)
                expert = expert_of(pair + gl.where(j + 1 < RUN, 1, 0), plan)
                second_strip = strip_of(expert, gl.where(j + 1 < RUN, item % strips2, strips2), strips2)
            for k in range(down_k):
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, BYTES)
                fetch_weights(
                    codes2_desc, scales2_desc, first_strip, k, groups2, bar, ring[1], ring[2], stage * WGS
                )  # fmt: skip
                fetch_weights(
                    codes2_desc, scales2_desc, second_strip, k, groups2, bar, ring[1], ring[2], stage * WGS + 1
                )
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _produce_rows(
    x, hidden, strips13, strips2, plan, sync_ptr, ring, shape, interval,
    TOP_K: gl.constexpr, RUN: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    x_ptr, x_stride, columns = x
    h_ptr, h_stride = hidden
    x_bufs, full, empty = ring[0], ring[3], ring[4]
    tiles, up_n, down_n, up_k, down_k = shape
    TOKENS: gl.constexpr = x_bufs.type.shape[1]
    layout: gl.constexpr = row_layout(128, 8)
    cols = gl.arange(0, 128, gl.SliceLayout(0, layout))
    lane = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    stage = 0
    phase = 1
    sent = 0
    wait_for_last()
    first, last = tiles_of(interval, up_k)
    for item in range(first, last):
        row, end = rows_of(item // up_n, plan)
        valid = (row + lane < end)[:, None]
        source = gather(x_ptr, tokens_of(row + lane, end, plan[0], TOP_K), x_stride, cols)
        first_k, last_k = stages_within(item, interval, up_k)
        for k in range(first_k, last_k):
            mbarrier.wait(empty.index(stage), phase)
            sent = copy_groups(x_bufs, full, stage, sent, source, k, columns, valid, STAGES, LAG)
            stage, phase = advance(stage, phase, STAGES)
    flush_groups(full, stage, sent, STAGES, LAG)
    sent = 0
    first, last = down_share(shape, strips2, RUN)
    # The tile's numbers are read while waiting, and again only where the next tile begins.
    known = first // down_n
    row, end = rows_of(gl.minimum(known, tiles - 1), plan)
    wait_for(sync_ptr, tiles * strips13)
    for item in range(first, last):
        for j in range(0, RUN, 2):
            if RUN > 1:
                row = item // strips2 * RUN + j
                end = row + gl.where(j + 1 < RUN, 2, 1)
            elif item // down_n != known:
                known = item // down_n
                row, end = rows_of(known, plan)
            valid = (row + lane < end)[:, None]
            source = gather(h_ptr, row + lane, h_stride, cols)
            for k in range(down_k):
                mbarrier.wait(empty.index(stage), phase)
                sent = copy_groups(x_bufs, full, stage, sent, source, k, h_stride, valid, STAGES, LAG)
                stage, phase = advance(stage, phase, STAGES)
    flush_groups(full, stage, sent, STAGES, LAG)
    if RUN > 1:
        # No consumer waits for all: the last CTA to have seen h resets what it waited for.
        gl.thread_barrier()
        if gl.atomic_add(sync_ptr + 2, 1, sem="acq_rel") == gl.num_programs(0) - 1:
            gl.store(sync_ptr, 0)
            gl.store(sync_ptr + 2, 0)


@gluon.jit
def _hand_over(landed, full, strips2, shape, interval, RUN: gl.constexpr, STAGES: gl.constexpr):
    """Tells the consumers of token rows that have landed. The fence between cp.async's proxy and wgmma's waits for all
    that its warp has on its way, so it is a warp without copies of its own that makes it."""
    up_n, down_n, up_k, down_k = shape[1:]
    stage = 0
    phase = 0
    wait_for_last()
    first, last = down_share(shape, strips2, RUN)
    for _ in range(interval[1] - interval[0] + (last - first) * ((RUN + 1) // 2) * down_k):
        mbarrier.wait(landed.index(stage), phase)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _produce_stages(
    NTH: gl.constexpr, WARPS: gl.constexpr, landed, x, hidden, strips13, strips2, plan, sync_ptr, ring, shape, interval,
    TOP_K: gl.constexpr, RUN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Every WARPS-th stage's token rows, by one warp: the fence behind a copy waits for all that its warp has on the
    way, so a warp has one stage on its way, and the warps have as many as they are."""
    x_ptr, x_stride, columns = x
    h_ptr, h_stride = hidden
    x_bufs, full, empty = ring[0], ring[3], ring[4]
    tiles, up_n, down_n, up_k, down_k = shape
    TOKENS: gl.constexpr = x_bufs.type.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [1, 1], [1, 0])
    cols = gl.arange(0, 128, gl.SliceLayout(0, layout))
    lane = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    stage = 0
    phase = 1
    turn = 0
    wait_for_last()
    first, last = tiles_of(interval, up_k)
    for item in range(first, last):
        row, end = rows_of(item // up_n, plan)
        valid = (row + lane < end)[:, None]
        source = gather(x_ptr, tokens_of(row + lane, end, plan[0], TOP_K), x_stride, cols)
        first_k, last_k = stages_within(item, interval, up_k)
        for k in range(first_k, last_k):
            if turn == NTH:
                mbarrier.wait(empty.index(stage), phase)
                copy_stage(x_bufs, full, landed, stage, source, k, columns, valid)
            turn = gl.where(turn == WARPS - 1, 0, turn + 1)
            stage, phase = advance(stage, phase, STAGES)
    first, last = down_share(shape, strips2, RUN)
    # The tile's numbers are read while waiting, and again only where the next tile begins.
    known = first // down_n
    row, end = rows_of(gl.minimum(known, tiles - 1), plan)
    wait_for(sync_ptr, tiles * strips13)
    for item in range(first, last):
        for j in range(0, RUN, 2):
            if RUN > 1:
                row = item // strips2 * RUN + j
                end = row + gl.where(j + 1 < RUN, 2, 1)
            elif item // down_n != known:
                known = item // down_n
                row, end = rows_of(known, plan)
            valid = (row + lane < end)[:, None]
            source = gather(h_ptr, row + lane, h_stride, cols)
            for k in range(down_k):
                if turn == NTH:
                    mbarrier.wait(empty.index(stage), phase)
                    copy_stage(x_bufs, full, landed, stage, source, k, h_stride, valid)
                turn = gl.where(turn == WARPS - 1, 0, turn + 1)
                stage, phase = advance(stage, phase, STAGES)
    if RUN > 1:
        # No consumer waits for all: the last to have seen h resets what it waited for.
        gl.thread_barrier()
        if gl.atomic_add(sync_ptr + 2, 1, sem="acq_rel") == gl.num_programs(0) * WARPS - 1:
            gl.store(sync_ptr, 0)
            gl.store(sync_ptr + 2, 0)


@gluon.jit
def _consume(
    WHO: gl.constexpr, plan, hidden, result, scales, strips13, partials, sync_ptr, ring, meeting, shape, interval,
    H: gl.constexpr, TOP_K: gl.constexpr, PADDED: gl.constexpr, RUN: gl.constexpr, SUM: gl.constexpr,
    STAGES: gl.constexpr, WGS: gl.constexpr, SCALE_A_TOKEN: gl.constexpr,
):  # fmt: skip
    h_ptr, h_stride = hidden
    y_ptr = result[0]
    x_scale_ptr, h_scale_ptr = scales
    up_n, down_n, up_k, down_k = shape[1:]
    TOKENS: gl.constexpr = ring[0].type.shape[1]
    h_layout: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    stage = 0
    phase = 0
    wait_for_last()
    h_scale = gl.load(h_scale_ptr)
    gate_scale = 512.0
    if not SCALE_A_TOKEN:
        gate_scale = 512.0 * gl.load(x_scale_ptr)
    first, last = tiles_of(interval, up_k)
    for item in range(first, last):
        # Loaded here, the tile's numbers arrive while it multiplies.
        row, end = rows_of(item // up_n, plan)
        first_k, last_k = stages_within(item, interval, up_k)
        acc, stage, phase = multiply_packed(WHO, ring, stage, phase, last_k - first_k, TOKENS, STAGES, WGS)
        whole = last_k - first_k == up_k
        if not whole:
            acc, whole = sum_parts(WHO, WGS, acc, item, first_k, interval, up_k, partials)
        strip = item % up_n * WGS + WHO
        if whole & (strip < strips13):
            token_scale_ptr = x_scale_ptr if SCALE_A_TOKEN else None
            h = scaled_swiglu(acc, gate_scale, gate_scale / h_scale, row, end, token_scale_ptr, plan[0], TOP_K)
            store_columns(h, h_ptr, h_stride, row, end, strip * 32, h_layout)
            count(sync_ptr)

    scale = 512.0 * h_scale
    first, last = down_share(shape, H // 64, RUN)
    if RUN > 1:
        for item in range(first, last):
            stage, phase = sum_token(
                WHO, plan, result, scale, ring, meeting, stage, phase, item, item - first, down_k, H, RUN, STAGES, WGS
            )
    else:
        for item in range(first, last):
            row, end = rows_of(item // down_n, plan)
            acc, stage, phase = multiply_packed(WHO, ring, stage, phase, down_k, TOKENS, STAGES, WGS)
            store_tile(acc * scale, row, end, item % down_n * WGS + WHO, y_ptr, H)

    if RUN == 1:
        count(sync_ptr + 1)
        wait_for(sync_ptr + 1, gl.num_programs(0) * WGS)
        combine_rows(WHO, result, H, TOP_K, PADDED, WGS, SUM)
        gl.thread_barrier()
        if gl.atomic_add(sync_ptr + 2, 1, sem="acq_rel") == gl.num_programs(0) * WGS - 1:
            for i in gl.static_range(3):
                gl.store(sync_ptr + i, 0)


@gluon.jit(do_not_specialize=["tokens", "first_expert", "experts"])
def experts_decode_w4a8_kernel(
    x_ptr, x_stride, codes13_desc, scales13_desc, codes2_desc, scales2_desc, h_ptr, h_stride, y_ptr, weights_ptr,
    shared_ptr, out_ptr, ids_ptr, first_expert, experts, rows_ptr, slots_ptr, tiles_ptr, tile_count_ptr,
    partial_ptr, counters_ptr, sync_ptr, x_scale_ptr, h_scale_ptr, tokens,
    H: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PADDED: gl.constexpr, SUM: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, CTAS: gl.constexpr, ROW_WARPS: gl.constexpr, SCALE_A_TOKEN: gl.constexpr, X_LAYOUT: gl.constexpr,
):  # fmt: skip
    """``out[t] = sum over j of weights[t, j] * w2[e] swiglu(w13[e] x[t]) + shared[t]``, e the expert of pair (t, j).

    Descriptors are `launch.weight_descriptors`' of the packed w13, gated, and w2. h: e4m3 ``[pairs, *]``, rows padded
    with zeros to a multiple of 256; y: bf16 ``[pairs, H]``; partial: fp32 ``[2 * CTAs, 2, 64, TOKENS]``; counters:
    int32 zeros, one a gate-up strip of every tile; sync: three zeros. Rows, slots and tiles are a `RoutePlan`'s, or
    None where few pairs share an expert: then every pair is a tile. PADDED:
    TOP_K rounded up to a power of two; CTAS: of them on an SM; SUM: tokens whose rows are summed at a time, 4 or 8.
    x_scale: fp32 ``[T]`` where SCALE_A_TOKEN, else one.
    """
    WGS: gl.constexpr = 2
    x_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, TOKENS, 128], X_LAYOUT)
    codes, code_scales = weight_buffers(codes13_desc, scales13_desc, STAGES, WGS)
    full, empty = make_barriers(STAGES, 2, WGS)
    # Where the two consumers' sums of a token meet.
    buffer = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    filled, free = make_barriers(1, 1, 1)
    meeting = (buffer, filled, free)
    # Without a plan a CTA has all of a token's tiles of a strip one after the other, and sums them itself.
    RUN: gl.constexpr = TOP_K if tiles_ptr is None else 1
    up_n = gl.cdiv(WIDTH // 32, WGS)
    down_n = gl.cdiv(H // 64, WGS)
    up_k = (H + 255) // 256
    down_k = (WIDTH + 255) // 256
    launch_next()
    # Launched while the plan is still being made: everything it wrote is read after this.
    wait_for_last()
    tiles = tokens * TOP_K if tile_count_ptr is None else gl.load(tile_count_ptr)
    interval = interval_of(tiles * up_n * up_k, 1)
    plan = (rows_ptr, tiles_ptr, ids_ptr, first_expert, experts)
    hidden = (h_ptr, h_stride)
    result = (y_ptr, slots_ptr, weights_ptr, shared_ptr, out_ptr, tokens)
    partials = (partial_ptr, counters_ptr)
    ring = (x_bufs, codes, code_scales, full, empty)
    shape = (tiles, up_n, down_n, up_k, down_k)
    scales = (x_scale_ptr, h_scale_ptr)
    w13 = (codes13_desc, scales13_desc, WIDTH // 32, H // 128)
    w2 = (codes2_desc, scales2_desc, H // 64, (WIDTH + 127) // 128)
    if ROW_WARPS == 3:
        gl.warp_specialize(
            [
                (_consume, (0, plan, hidden, result, scales, WIDTH // 32, partials, sync_ptr, ring, meeting, shape,
                            interval, H, TOP_K, PADDED, RUN, SUM, STAGES, WGS, SCALE_A_TOKEN)),
                (_consume, (1, plan, hidden, result, scales, WIDTH // 32, partials, sync_ptr, ring, meeting, shape,
                            interval, H, TOP_K, PADDED, RUN, SUM, STAGES, WGS, SCALE_A_TOKEN)),
                (_produce_stages, (0, 3, None, (x_ptr, x_stride, H), hidden, WIDTH // 32, H // 64, plan, sync_ptr, ring, shape,
                                   interval, TOP_K, RUN, STAGES)),
                (_produce_stages, (1, 3, None, (x_ptr, x_stride, H), hidden, WIDTH // 32, H // 64, plan, sync_ptr, ring, shape,
                                   interval, TOP_K, RUN, STAGES)),
                (_produce_stages, (2, 3, None, (x_ptr, x_stride, H), hidden, WIDTH // 32, H // 64, plan, sync_ptr, ring, shape,
                                   interval, TOP_K, RUN, STAGES)),
                (_produce_weights, (w13, w2, plan, ring, shape, interval, RUN, STAGES, WGS)),
            ],
            [4, 1, 1, 1, 1],
            [200, 96, 96, 96, 96] if CTAS == 1 else [96, 40, 40, 40, 40],
        )  # fmt: skip
    elif ROW_WARPS == 1:
        landed, _ = make_barriers(STAGES, 32, 1)
        gl.warp_specialize(
            [
                (_consume, (0, plan, hidden, result, scales, WIDTH // 32, partials, sync_ptr, ring, meeting, shape,
                            interval, H, TOP_K, PADDED, RUN, SUM, STAGES, WGS, SCALE_A_TOKEN)),
                (_consume, (1, plan, hidden, result, scales, WIDTH // 32, partials, sync_ptr, ring, meeting, shape,
                            interval, H, TOP_K, PADDED, RUN, SUM, STAGES, WGS, SCALE_A_TOKEN)),
                (_produce_stages, (0, 1, landed, (x_ptr, x_stride, H), hidden, WIDTH // 32, H // 64, plan, sync_ptr, ring, shape,
                                   interval, TOP_K, RUN, STAGES)),
                (_hand_over, (landed, full, H // 64, shape, interval, RUN, STAGES)),
                (_produce_weights, (w13, w2, plan, ring, shape, interval, RUN, STAGES, WGS)),
            ],
            [4, 1, 1, 1],
            [200, 96, 96, 96] if CTAS == 1 else [96, 40, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
        [
            (_consume, (0, plan, hidden, result, scales, WIDTH // 32, partials, sync_ptr, ring, meeting, shape,
                        interval, H, TOP_K, PADDED, RUN, SUM, STAGES, WGS, SCALE_A_TOKEN)),
            (_consume, (1, plan, hidden, result, scales, WIDTH // 32, partials, sync_ptr, ring, meeting, shape,
                        interval, H, TOP_K, PADDED, RUN, SUM, STAGES, WGS, SCALE_A_TOKEN)),
            (_produce_rows, ((x_ptr, x_stride, H), hidden, WIDTH // 32, H // 64, plan, sync_ptr, ring, shape, interval,
                             TOP_K, RUN, STAGES, 3)),
            (_produce_weights, (w13, w2, plan, ring, shape, interval, RUN, STAGES, WGS)),
        ],
        [4, 4, 1],
        [200, 72, 40] if CTAS == 1 else [96, 40, 24],
    )  # fmt: skip
