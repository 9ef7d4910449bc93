"""Routed experts of packed int4 for the fewest tokens: gate-up, SwiGLU, down and weighted sum in one launch, with
nothing before it.

Nearly every (token, choice) pair has an expert of its own, so sorting them would save no reading: every pair is a
gate-up tile, and all tiles' stages are dealt in equal shares (`gemm.stream_k`). Of the down product a CTA takes a strip
of a token with all its experts, one after the other, so that the weighted sum ends in registers. What fetches weights
never waits for anything but room in the ring; token rows come from a warpgroup of their own, which before the first h
waits until every gate-up tile of the GPU is done. Counters are zero between calls.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from katydid_kernels.gemm.expert_tiles import gather, row_layout, scaled_swiglu, store_columns, tokens_of
from katydid_kernels.gemm.ring import advance, launch_next, make_barriers, wait_for_last
from katydid_kernels.gemm.stream_k import interval_of, stages_within, sum_parts, tiles_of
from katydid_kernels.w4a8.packed_tiles import (
    accumulator_layout,
    copy_groups,
    fetch_weights,
    flush_groups,
    multiply_packed,
    strip_of,
    weight_buffers,
)

__all__ = ["experts_few_w4a8_kernel"]


@gluon.jit
def _local_expert(pair, pairs):
    """The pair's expert among the local ones, 0 where it is none of them, and whether it is one."""
    ids_ptr, first_expert, number = pairs
    expert = gl.load(ids_ptr + pair) - first_expert
    local = (expert >= 0) & (expert < number)
    return gl.where(local, expert, 0), local


@gluon.jit
def _down_share(tokens, strips):
    """First and end of this CTA's strips of tokens."""
    items = tokens * strips
    return items * gl.program_id(0) // gl.num_programs(0), items * (gl.program_id(0) + 1) // gl.num_programs(0)


@gluon.jit
def _produce_weights(
    w13, w2, pairs, ring, shape, interval, TOP_K: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr
):
    full, empty = ring[3], ring[4]
    tokens, up_n, up_k, down_k = shape
    codes13_desc, scales13_desc, strips13, groups13 = w13
    codes2_desc, scales2_desc, strips2, groups2 = w2
    BYTES: gl.constexpr = WGS * (codes13_desc.block_type.nbytes + scales13_desc.block_type.nbytes)
    stage = 0
    phase = 1
    wait_for_last()
    first, last = tiles_of(interval, up_k)
    for item in range(first, last):
        expert, _ = _local_expert(item // up_n, pairs)
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
    first, last = _down_share(tokens, strips2)
    for item in range(first, last):
        for j in range(0, TOP_K, 2):
            pair = item // strips2 * TOP_K + j
            expert, _ = _local_expert(pair, pairs)
            other, _ = _local_expert(pair + gl.where(j + 1 < TOP_K, 1, 0), pairs)
            strip = strip_of(expert, item % strips2, strips2)
            other_strip = strip_of(other, gl.where(j + 1 < TOP_K, item % strips2, strips2), strips2)
            for k in range(down_k):
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, BYTES)
                fetch_weights(codes2_desc, scales2_desc, strip, k, groups2, bar, ring[1], ring[2], stage * WGS)
                fetch_weights(
                    codes2_desc, scales2_desc, other_strip, k, groups2, bar, ring[1], ring[2], stage * WGS + 1
                )
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _wait_for(counter_ptr, count):
    """Spin until the counter has reached `count`; what was written before it was counted is then visible."""
    seen = 0
    while seen < count:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _produce_rows(
    x, hidden, strips13, strips2, sync_ptr, ring, shape, interval,
    TOP_K: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    x_ptr, x_stride, columns = x
    h_ptr, h_stride = hidden
    x_bufs, full, empty = ring[0], ring[3], ring[4]
    tokens, up_n, up_k, down_k = shape
    layout: gl.constexpr = row_layout(128, 8)
    cols = gl.arange(0, 128, gl.SliceLayout(0, layout))
    lane = gl.arange(0, x_bufs.type.shape[1], gl.SliceLayout(1, layout))
    stage = 0
    phase = 1
    sent = 0
    wait_for_last()
    first, last = tiles_of(interval, up_k)
    for item in range(first, last):
        row = item // up_n
        valid = (lane < 1)[:, None]
        source = gather(x_ptr, tokens_of(row + lane, row + 1, None, TOP_K), x_stride, cols)
        first_k, last_k = stages_within(item, interval, up_k)
        for k in range(first_k, last_k):
            mbarrier.wait(empty.index(stage), phase)
            sent = copy_groups(x_bufs, full, stage, sent, source, k, columns, valid, STAGES, LAG)
            stage, phase = advance(stage, phase, STAGES)
    flush_groups(full, stage, sent, STAGES, LAG)
    sent = 0
    first, last = _down_share(tokens, strips2)
    _wait_for(sync_ptr, tokens * TOP_K * strips13)
    for item in range(first, last):
        for j in range(0, TOP_K, 2):
            row = item // strips2 * TOP_K + j
            valid = (lane < gl.where(j + 1 < TOP_K, 2, 1))[:, None]
            source = gather(h_ptr, row + lane, h_stride, cols)
            for k in range(down_k):
                mbarrier.wait(empty.index(stage), phase)
                sent = copy_groups(x_bufs, full, stage, sent, source, k, h_stride, valid, STAGES, LAG)
                stage, phase = advance(stage, phase, STAGES)
    flush_groups(full, stage, sent, STAGES, LAG)
    # The last CTA to have seen h resets what it waited for.
    gl.thread_barrier()
    if gl.atomic_add(sync_ptr + 2, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(sync_ptr, 0)
        gl.store(sync_ptr + 2, 0)


@gluon.jit
def _consume(
    WHO: gl.constexpr, pairs, hidden, result, scales, strips13, partials, sync_ptr, ring, meeting, shape, interval,
    H: gl.constexpr, TOP_K: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr, SCALE_A_TOKEN: gl.constexpr,
):  # fmt: skip
    h_ptr, h_stride = hidden
    x_scale_ptr, h_scale_ptr = scales
    tokens, up_n, up_k, down_k = shape
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
        row = item // up_n
        _, local = _local_expert(row, pairs)
        first_k, last_k = stages_within(item, interval, up_k)
        acc, stage, phase = multiply_packed(WHO, ring, stage, phase, last_k - first_k, TOKENS, STAGES, WGS)
        whole = last_k - first_k == up_k
        if not whole:
            acc, whole = sum_parts(WHO, WGS, acc, item, first_k, interval, up_k, partials)
        strip = item % up_n * WGS + WHO
        if whole & (strip < strips13):
            end = gl.where(local, row + 1, row)
            token_scale_ptr = x_scale_ptr if SCALE_A_TOKEN else None
            h = scaled_swiglu(acc, gate_scale, gate_scale / h_scale, row, end, token_scale_ptr, None, TOP_K)
            store_columns(h, h_ptr, h_stride, row, end, strip * 32, h_layout)
            gl.thread_barrier()
            gl.atomic_add(sync_ptr, 1, sem="release")
    first, last = _down_share(tokens, H // 64)
    for item in range(first, last):
        stage, phase = _sum_token(
            WHO, pairs, result, 512.0 * h_scale, ring, meeting, stage, phase, item, item - first, down_k,
            H, TOP_K, STAGES, WGS,
        )  # fmt: skip


@gluon.jit
def _sum_token(
    WHO: gl.constexpr, pairs, result, scale, ring, meeting, stage, phase, item, turn, down_k,
    H: gl.constexpr, TOP_K: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr,
):  # fmt: skip
    """A token's strip of the result, and the place in the ring after it: each warpgroup weighs and sums every other of
    its experts, whose rows are columns 0 and 1 of the product."""
    weights_ptr, shared_ptr, out_ptr = result
    buffer, filled, free = meeting
    TOKENS: gl.constexpr = ring[0].type.shape[1]
    STRIPS: gl.constexpr = H // 64
    layout: gl.constexpr = accumulator_layout(TOKENS)
    total = gl.zeros([64, TOKENS], gl.float32, layout)
    # Where no row was copied a product may be NaN: it is left out, not multiplied by zero.
    for j in range(WHO, TOP_K + WHO, 2):
        pair = item // STRIPS * TOP_K + gl.minimum(j, TOP_K - 1)
        _, local = _local_expert(pair, pairs)
        weight = gl.load(weights_ptr + pair) * scale
        acc, stage, phase = multiply_packed(WHO, ring, stage, phase, down_k, TOKENS, STAGES, WGS)
        total += gl.where(local & (j < TOP_K), acc * weight, 0.0)
    lane = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    mine = gl.sum(gl.where((lane == WHO)[None, :], total, 0.0), 1)
    if WHO == 1:
        mbarrier.wait(free.index(0), (turn & 1) ^ 1)
        buffer.store(mine)
        gl.thread_barrier()
        mbarrier.arrive(filled.index(0), count=1)
    else:
        cols = item // STRIPS * H + item % STRIPS * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        if shared_ptr is not None:
            mine += gl.load(shared_ptr + cols).to(gl.float32)
        mbarrier.wait(filled.index(0), turn & 1)
        mine += buffer.load(gl.SliceLayout(1, layout))
        gl.thread_barrier()
        mbarrier.arrive(free.index(0), count=1)
        gl.store(out_ptr + cols, mine.to(out_ptr.dtype.element_ty))
    return stage, phase


@gluon.jit(do_not_specialize=["tokens", "first_expert", "number"])
def experts_few_w4a8_kernel(
    x_ptr, x_stride, codes13_desc, scales13_desc, codes2_desc, scales2_desc, h_ptr, h_stride, weights_ptr, shared_ptr,
    out_ptr, ids_ptr, first_expert, number, partial_ptr, counters_ptr, sync_ptr, x_scale_ptr, h_scale_ptr, tokens,
    H: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    SCALE_A_TOKEN: gl.constexpr, X_LAYOUT: gl.constexpr,
):  # fmt: skip
    """`experts_decode_w4a8_kernel` for few pairs; arguments as there, and

    ids: int32 ``[tokens, TOP_K]``, of which ``first_expert + [0, number)`` are local; partial: fp32 ``[2 * CTAs, 2, 64,
    TOKENS]``; counters: int32 zeros, one a gate-up strip of every pair; sync: three zeros; out and shared with rows of
    H. TOP_K is 2 or more.
    """
    WGS: gl.constexpr = 2
    x_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, TOKENS, 128], X_LAYOUT)
    codes, code_scales = weight_buffers(codes13_desc, scales13_desc, STAGES, WGS)
    full, empty = make_barriers(STAGES, 2, WGS)
    # Where the two consumers' sums of a token meet.
    buffer = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    filled, free = make_barriers(1, 1, 1)
    meeting = (buffer, filled, free)
    up_k = (H + 255) // 256
    shape = (tokens, WIDTH // 64, up_k, (WIDTH + 255) // 256)
    launch_next()
    interval = interval_of(tokens * TOP_K * (WIDTH // 64) * up_k, 1)
    pairs = (ids_ptr, first_expert, number)
    hidden = (h_ptr, h_stride)
    result = (weights_ptr, shared_ptr, out_ptr)
    partials = (partial_ptr, counters_ptr)
    ring = (x_bufs, codes, code_scales, full, empty)
    scales = (x_scale_ptr, h_scale_ptr)
    w13 = (codes13_desc, scales13_desc, WIDTH // 32, H // 128)
    w2 = (codes2_desc, scales2_desc, H // 64, (WIDTH + 127) // 128)
    gl.warp_specialize(
        [
            (_consume, (0, pairs, hidden, result, scales, WIDTH // 32, partials, sync_ptr, ring, meeting, shape,
                        interval, H, TOP_K, STAGES, WGS, SCALE_A_TOKEN)),
            (_consume, (1, pairs, hidden, result, scales, WIDTH // 32, partials, sync_ptr, ring, meeting, shape,
                        interval, H, TOP_K, STAGES, WGS, SCALE_A_TOKEN)),
            (_produce_rows, ((x_ptr, x_stride, H), hidden, WIDTH // 32, H // 64, sync_ptr, ring, shape, interval,
                             TOP_K, STAGES, 3)),
            (_produce_weights, (w13, w2, pairs, ring, shape, interval, TOP_K, STAGES, WGS)),
        ],
        [4, 4, 1],
        [200, 72, 40],
    )  # fmt: skip
