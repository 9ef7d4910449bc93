"""Routed experts for the fewest tokens: gate-up, SwiGLU, down and weighted sum in one launch, with nothing before it.

Up to some 24 (token, choice) pairs nearly every pair has an expert of its own, so sorting them would save no reading:
every pair is a gate-up tile of its own. A down tile is 64 columns of one token through all its experts, so the weighted
sum ends in registers. It waits for its token's gate-up tiles only, while its weights already stand in the ring. What a
batch takes beyond reading the weights is a chain of latencies: ids, first weights, h to memory and back, output.

A tile has one token, but wgmma eight columns: the copy engine fetches seven rows more, whatever they hold.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from katydid_kernels.gemm.expert_tiles import (
    accumulator_layout,
    multiply,
    scaled_swiglu,
    store_columns,
)
from katydid_kernels.gemm.experts_order import count, down_share, nth_item, wait_for_count
from katydid_kernels.gemm.ring import advance, launch_next, make_barriers, wait_for_last

__all__ = ["experts_few_kernel"]


@gluon.jit
def _local_expert(ids_ptr, pair, experts):
    """The pair's expert among the local ones, and whether it is one."""
    first_expert, number = experts
    expert = gl.load(ids_ptr + pair) - first_expert
    return expert, (expert >= 0) & (expert < number)


@gluon.jit
def _choices(ids_ptr, token, TOP_K: gl.constexpr, PADDED: gl.constexpr, experts):
    """A token's experts, in every thread; -1 for what is not local."""
    layout: gl.constexpr = gl.BlockedLayout([PADDED], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, PADDED, layout)
    first_expert, number = experts
    expert = gl.load(ids_ptr + token * TOP_K + lane, mask=lane < TOP_K, other=-1) - first_expert
    return lane, gl.where((expert >= 0) & (expert < number) & (lane < TOP_K), expert, -1)


@gluon.jit
def _pick(values, lane, j):
    """Element j of a short vector that every thread holds."""
    return gl.sum(gl.where(lane == j, values, gl.zeros_like(values)), 0)


@gluon.jit
def _stream_weights(
    w13_desc, w2_desc, ids_ptr, experts, ring, shape, TOP_K: gl.constexpr, PADDED: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    _, w_bufs, full, empty = ring
    up_items, share, up_n, down_n, up_k, down_k = shape
    GROUPS: gl.constexpr = w13_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = w13_desc.block_type.shape[4]
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), up_items, gl.num_programs(0)):
        expert, local = _local_expert(ids_ptr, item // up_n, experts)
        for k in range(gl.where(local, up_k, 0)):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, w13_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                w13_desc, [expert, item % up_n * GROUPS, 0, 0, k * BLOCK_K], bar, w_bufs.index(stage)
            )
            stage, phase = advance(stage, phase, STAGES)
    for nth in range(share[0]):
        item = nth_item(nth, share)
        lane, chosen = _choices(ids_ptr, item // down_n, TOP_K, PADDED, experts)
        for j in range(TOP_K):
            expert = _pick(chosen, lane, j)
            for k in range(gl.where(expert >= 0, down_k, 0)):
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, w2_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    w2_desc, [expert, item % down_n * (2 * GROUPS), 0, k * BLOCK_K], bar,
                    w_bufs.index(stage).reshape([1, 2 * GROUPS, 8, BLOCK_K]),
                )  # fmt: skip
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _stream_tokens(
    x_desc, h_desc, ids_ptr, experts, ready_ptr, ring, shape,
    TOP_K: gl.constexpr, PADDED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    x_bufs, _, full, empty = ring
    up_items, share, up_n, down_n, up_k, down_k = shape
    BLOCK_K: gl.constexpr = x_bufs.type.shape[2]
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), up_items, gl.num_programs(0)):
        pair = item // up_n
        expert, local = _local_expert(ids_ptr, pair, experts)
        for k in range(gl.where(local, up_k, 0)):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, x_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(x_desc, [pair // TOP_K, k * BLOCK_K], bar, x_bufs.index(stage))
            stage, phase = advance(stage, phase, STAGES)
    known = -1
    for nth in range(share[0]):
        item = nth_item(nth, share)
        token = item // down_n
        choice, chosen = _choices(ids_ptr, token, TOP_K, PADDED, experts)
        if token != known:
            wait_for_count(ready_ptr + token, TOP_K * up_n)
            known = token
        for j in range(TOP_K):
            expert = _pick(chosen, choice, j)
            for k in range(gl.where(expert >= 0, down_k, 0)):
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, h_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(h_desc, [token * TOP_K + j, k * BLOCK_K], bar, x_bufs.index(stage))
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _consume(
    ids_ptr, experts, hidden, result, counters, scales, ring, shape, H: gl.constexpr, TOP_K: gl.constexpr,
    PADDED: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr,
    UP_AT_ONCE: gl.constexpr, DOWN_AT_ONCE: gl.constexpr,
):  # fmt: skip
    h_ptr, h_stride = hidden
    weights_ptr, shared_ptr, out_ptr = result
    ready_ptr, sync_ptr, tokens = counters
    x_bufs, w_bufs, _, _ = ring
    up_items, share, up_n, down_n, up_k, down_k = shape
    up_scale_ptr, inverse_scale_ptr, down_scale_ptr, token_scale_ptr = scales
    TOKENS: gl.constexpr = x_bufs.type.shape[1]
    ROWS: gl.constexpr = w_bufs.type.shape[2] * 16
    h_layout: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 16, 512 // ROWS], [1, 4], [0, 1])
    out_layout: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, 4], [0, 1])
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), up_items, gl.num_programs(0)):
        pair = item // up_n
        expert, local = _local_expert(ids_ptr, pair, experts)
        if local:
            # Loaded here, the tile's numbers arrive while it multiplies.
            scale = up_scale_ptr + expert * 2
            gate_scale = gl.load(scale)
            up_scale = gl.load(scale + 1) * gl.load(inverse_scale_ptr)
            acc, stage, phase = multiply(
                0, ring, stage, phase, up_k, ROWS, TOKENS, STAGES, 1, PROMOTE, False, UP_AT_ONCE
            )
            h = scaled_swiglu(acc, gate_scale, up_scale, pair, pair + 1, token_scale_ptr, None, TOP_K)
            store_columns(h, h_ptr, h_stride, pair, pair + 1, item % up_n * (ROWS // 2), h_layout)
        count(ready_ptr + pair // TOP_K)

    for nth in range(share[0]):
        item = nth_item(nth, share)
        token = item // down_n
        choice, chosen = _choices(ids_ptr, token, TOP_K, PADDED, experts)
        factor = gl.load(down_scale_ptr + gl.maximum(chosen, 0))
        weight = gl.load(weights_ptr + token * TOP_K + choice, mask=choice < TOP_K, other=0.0)
        total = gl.zeros([ROWS, TOKENS], gl.float32, accumulator_layout(TOKENS, x_bufs.dtype.primitive_bitwidth))
        for j in range(TOP_K):
            if _pick(chosen, choice, j) >= 0:
                acc, stage, phase = multiply(
                    0, ring, stage, phase, down_k, ROWS, TOKENS, STAGES, 1, PROMOTE, False, DOWN_AT_ONCE
                )
                # Rounded as where a pair's row goes through memory: its bits are then the same.
                row = (acc * _pick(factor, choice, j)).to(gl.bfloat16).to(gl.float32)
                total += row * _pick(weight, choice, j)
        col = item % down_n * ROWS
        value = gl.convert_layout(total, out_layout)
        columns = col + gl.arange(0, ROWS, gl.SliceLayout(1, out_layout))
        lane = gl.arange(0, TOKENS, gl.SliceLayout(0, out_layout))
        place = (token * H + columns)[:, None] + lane[None, :]
        first = (lane < 1)[None, :] & (columns >= 0)[:, None]
        if shared_ptr is not None:
            value += gl.load(shared_ptr + place, mask=first, other=0.0).to(gl.float32)
        gl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=first)

    gl.thread_barrier()
    if gl.atomic_add(sync_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        for i in range(tokens):
            gl.store(ready_ptr + i, 0)
        gl.store(sync_ptr + 1, 0)


@gluon.jit(do_not_specialize=["tokens", "first_expert", "number"])
def experts_few_kernel(
    x_desc, w13_desc, w2_desc, h_desc, h_ptr, h_stride, weights_ptr, shared_ptr, out_ptr, ids_ptr,
    first_expert, number, ready_ptr, sync_ptr, up_scale_ptr, inverse_scale_ptr, down_scale_ptr, token_scale_ptr, tokens,
    H: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PADDED: gl.constexpr,
    STAGES: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    """`experts_decode_kernel` for few pairs; arguments as there, and

    x_desc, h_desc: boxes ``[8, BLOCK_K]``; ids: int32 ``[tokens, TOP_K]``, of which ``first_expert + [0, number)`` are
    local; PADDED: TOP_K rounded up to a power of two; ready: zeros, an int32 a token; out and shared with rows of H.
    """
    GROUPS: gl.constexpr = w13_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = w13_desc.block_type.shape[4]
    x_bufs = gl.allocate_shared_memory(w13_desc.dtype, [STAGES, x_desc.block_type.shape[0], BLOCK_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(w13_desc.dtype, [STAGES, 1, GROUPS, 2, 8, BLOCK_K], w13_desc.layout)
    full, empty = make_barriers(STAGES, 2, 1)
    up_n = WIDTH // (GROUPS * 8)
    down_n = H // (GROUPS * 16)
    up_k: gl.constexpr = H // BLOCK_K
    down_k: gl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    UP_AT_ONCE: gl.constexpr = 4 if up_k % 4 == 0 else 2 if up_k % 2 == 0 else 1
    DOWN_AT_ONCE: gl.constexpr = 2 if down_k % 2 == 0 else 1
    up_items = tokens * TOP_K * up_n
    share = down_share(tokens, TOP_K * up_n, down_n, H, TOP_K * WIDTH)
    launch_next()
    wait_for_last()
    experts = (first_expert, number)
    hidden = (h_ptr, h_stride)
    result = (weights_ptr, shared_ptr, out_ptr)
    counters = (ready_ptr, sync_ptr, tokens)
    scales = (up_scale_ptr, inverse_scale_ptr, down_scale_ptr, token_scale_ptr)
    ring = (x_bufs, w_bufs, full, empty)
    shape = (up_items, share, up_n, down_n, up_k, down_k)
    gl.warp_specialize(
        [
            (_consume, (ids_ptr, experts, hidden, result, counters, scales, ring, shape,
                        H, TOP_K, PADDED, STAGES, PROMOTE, UP_AT_ONCE, DOWN_AT_ONCE)),
            (_stream_tokens, (x_desc, h_desc, ids_ptr, experts, ready_ptr, ring, shape, TOP_K, PADDED, STAGES)),
            (_stream_weights, (w13_desc, w2_desc, ids_ptr, experts, ring, shape, TOP_K, PADDED, STAGES)),
        ],
        [1, 1],
        [40, 40],
    )  # fmt: skip
