"""Prefill on Hopper: one warp feeds pages through TMA, two warpgroups each own 64 queries and overlap both products.

Persistent: a CTA walks its share of the plan, heaviest tiles first, and the loading warp runs ahead across tile
borders. A consumer issues the scores of the next KV tile and the output product of the current one together and does
the softmax of the next while the output product still runs.  With PING_PONG the two consumers take turns at issuing,
so that one's softmax falls into the other's products.

fp8: each output product goes to a fresh tile that is then added to the output in fp32 (the tensor cores keep about 22
bits of their accumulators, and `output * keep + tile` costs what the rescaling alone would).  The probabilities must
enter as the left operand, whose fp8 register order differs from the order scores come out in; instead of shuffling
them, the TMA box of K walks its tokens in the permuted order, so the scores come out where the operand wants them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from katydid_kernels.prefill_attention.feed import BLOCK_M, load_tiles, plan_item
from katydid_kernels.prefill_attention.score_tile import (
    LOG2E,
    add_columns,
    cap_scores,
    mask_scores,
    ordered,
    probability_operand,
)

__all__ = ["prefill_hopper_kernel"]


@gluon.jit
def _scores(q, k_smem, k_full, stage, phase, into, D: gl.constexpr, N: gl.constexpr):
    """Issue the scores of the tile in `stage`; they take over the registers of `into`, whose values are lost."""
    bits: gl.constexpr = q.dtype.primitive_bitwidth
    mbarrier.wait(k_full.index(stage), phase)
    k = k_smem.index(stage)._reinterpret(q.dtype, [N, D], gl.NVMMASharedLayout(min(128, D * bits // 8), bits, 2))
    return warpgroup_mma(q, k.permute((1, 0)), into, use_acc=False, is_async=True)


@gluon.jit
def _attend(
    which: gl.constexpr,
    q_smem,
    k_smem,
    v_smem,
    bars,
    turn_bars,
    plan_ptr,
    out_ptr,
    lse_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    heads,
    kv_heads,
    together,
    scale,
    soft_cap,
    window,
    HAS_Q_SCALE: gl.constexpr,
    HAS_KV_SCALE: gl.constexpr,
    PER_HEAD: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
    D: gl.constexpr,
    N: gl.constexpr,
    PERMUTE: gl.constexpr,
    PING_PONG: gl.constexpr,
):
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    dtype: gl.constexpr = q_smem.dtype
    bits: gl.constexpr = dtype.primitive_bitwidth
    FP8: gl.constexpr = bits == 8
    SHIFT: gl.constexpr = 8.0 if FP8 else 0.0
    vec: gl.constexpr = 128 // bits
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 256 // bits])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 256 // bits])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 32 // bits)
    q_layout: gl.constexpr = gl.NVMMASharedLayout(min(128, D * bits // 8), bits, 2)
    v_layout: gl.constexpr = gl.NVMMASharedLayout(64 * bits // 8, bits, 2)
    v_fix: gl.constexpr = gl.BlockedLayout([1, vec], [32 * vec // 64, 64 // vec], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)

    rows = gl.arange(0, 64, row_layout) + which * 64
    o_rows = gl.arange(0, 64, o_row) + which * 64
    d = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    q = q_smem.index(which)._reinterpret(dtype, [64, D], q_layout)

    items = gl.load(plan_ptr)
    turn = 0
    i = 0
    valid, _row, head, q_first, q_end, position, first, last, length = plan_item(
        plan_ptr, turn, items, heads, together, window, N
    )
    while valid:
        at = position + rows
        factor = gl.full([64], scale, gl.float32, row_layout)
        if HAS_Q_SCALE:
            factor *= gl.load(q_scale_ptr + (q_first + rows) * heads + head, mask=q_first + rows < q_end, other=0.0)
        kv_head = head // (heads // kv_heads)
        if HAS_KV_SCALE:
            factor *= gl.load(k_scale_ptr + kv_head * PER_HEAD)
        factor = gl.maximum(factor, 1e-30)
        if SOFT_CAP:
            unit = gl.full([64], 1.0, gl.float32, row_layout)
        else:
            unit = factor * LOG2E
        acc = gl.zeros([64, D], gl.float32, o_layout)

        mbarrier.wait(q_full, turn & 1)
        nothing = gl.zeros([64, N], gl.float32, s_layout)
        s = _scores(q, k_smem, k_full, i % STAGES, (i // STAGES) & 1, nothing, D, N)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(i % STAGES))
        if last - first == 1:
            mbarrier.arrive(q_empty)
        if SOFT_CAP:
            s = cap_scores(s * factor[:, None], soft_cap)
        newest = at - (last - 1) * N
        s = mask_scores(s, newest, newest - window, WINDOW, PERMUTE)
        maximum = gl.maximum(gl.max(s, 1) * unit, -1e30)
        p32 = gl.exp2(s * unit[:, None] - (maximum - SHIFT)[:, None])
        keep = gl.full([64], 0.0, gl.float32, o_row)
        total = gl.sum(p32.reshape([64, N // 8, 8]), 1)
        valid_tokens = length - (last - 1) * N
        if valid_tokens < N:
            # Both warpgroups clear the tile, writing the same bytes: neither has to wait for the other.
            mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
            for pg in gl.static_range(N // 64):
                v_page = v_smem.index(i % STAGES).slice(pg * D, D)
                column = gl.arange(0, 64, gl.SliceLayout(0, v_fix)) + pg * 64
                v = v_page.load(v_fix)
                v_page.store(gl.where((column < valid_tokens)[None, :], v, gl.zeros_like(v)))
            fence_async_shared()
            gl.thread_barrier()
        i += 1
        for back in range(1, last - first):
            tile = last - 1 - back
            before = (i - 1) % STAGES
            p = probability_operand(p32, dtype, N, p_layout, PERMUTE)
            if PING_PONG:
                mbarrier.wait(turn_bars.index(which), ((i - turn) & 1) ^ which)
            s = _scores(q, k_smem, k_full, i % STAGES, (i // STAGES) & 1, p32, D, N)
            mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
            v = v_smem.index(before)._reinterpret(dtype, [D, N], v_layout).permute((1, 0))
            if FP8:
                o = warpgroup_mma(p, v, gl.zeros([64, D], gl.float32, o_layout), use_acc=False, is_async=True)
            else:
                acc = warpgroup_mma(p, v, acc, is_async=True)
            if PING_PONG:
                mbarrier.arrive(turn_bars.index(1 - which))
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(i % STAGES))
            if tile == first:
                mbarrier.arrive(q_empty)
            if SOFT_CAP:
                s = cap_scores(s * factor[:, None], soft_cap)
            edge = tile * N + N > position + 1
            if WINDOW:
                edge = edge | (tile * N <= position + BLOCK_M - 1 - window)
            if edge:
                newest = at - tile * N
                s = mask_scores(s, newest, newest - window, WINDOW, PERMUTE)
            new_maximum = gl.maximum(maximum, gl.max(s, 1) * unit)
            p32 = gl.exp2(s * unit[:, None] - (new_maximum - SHIFT)[:, None])
            shrink = gl.exp2(maximum - new_maximum)
            maximum = new_maximum
            total = ordered(add_columns(total, p32, shrink, N))
            if FP8:
                o = warpgroup_mma_wait(0, deps=[o])
                mbarrier.arrive(v_empty.index(before))
                acc = acc * keep[:, None] + o
                keep = gl.convert_layout(shrink, o_row)
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_empty.index(before))
                acc = acc * gl.convert_layout(shrink, o_row)[:, None]
            i += 1
        turn += 1
        upcoming = plan_item(plan_ptr, turn, items, heads, together, window, N)
        before = (i - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        v = v_smem.index(before)._reinterpret(dtype, [D, N], v_layout).permute((1, 0))
        p = probability_operand(p32, dtype, N, p_layout, PERMUTE)
        if FP8:
            o = warpgroup_mma(p, v, gl.zeros([64, D], gl.float32, o_layout), use_acc=False, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            acc = acc * keep[:, None] + o
        else:
            acc = warpgroup_mma(p, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(before))
        total = gl.convert_layout(gl.sum(total, 1), row_layout)
        inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
        if HAS_KV_SCALE:
            inverse *= gl.load(v_scale_ptr + kv_head * PER_HEAD)
        acc = acc * gl.convert_layout(inverse, o_row)[:, None]
        offset = ((q_first + o_rows).to(gl.int64) * heads + head) * D
        gl.store(
            out_ptr + offset[:, None] + d[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=(q_first + o_rows < q_end)[:, None],
        )
        log_sum = gl.where(total == 0.0, float("-inf"), (maximum + gl.log2(total) - SHIFT) / LOG2E)
        gl.store(lse_ptr + (q_first + rows) * heads + head, log_sum, mask=q_first + rows < q_end)
        valid, _row, head, q_first, q_end, position, first, last, length = upcoming


@gluon.jit(
    do_not_specialize=["heads", "kv_heads", "together", "table_stride", "window"],
    do_not_specialize_on_alignment=["table_ptr", "lse_ptr"],
)
def prefill_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    plan_ptr,
    table_ptr,
    out_ptr,
    lse_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    heads,
    kv_heads,
    together,
    table_stride,
    scale,
    soft_cap,
    window,
    HAS_Q_SCALE: gl.constexpr,
    HAS_KV_SCALE: gl.constexpr,
    PER_HEAD: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
    D: gl.constexpr,
    N: gl.constexpr,
    PERMUTE: gl.constexpr,
    PING_PONG: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    bits: gl.constexpr = dtype.primitive_bitwidth
    DB: gl.constexpr = min(D, 1024 // bits)
    row_bytes: gl.constexpr = min(128, D * bits // 8)
    k_layout: gl.constexpr = gl.NVMMASharedLayout(row_bytes, bits, 2)
    v_layout: gl.constexpr = gl.NVMMASharedLayout(64 * bits // 8, bits, 2)
    q_smem = gl.allocate_shared_memory(dtype, [2, D // DB * 64, DB], k_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, D // DB * N, DB], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, N // 64 * D, 64], v_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2)
    for w in gl.static_range(2):
        mbarrier.init(turn_bars.index(w), count=1)
    fence_async_shared()
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    gl.constexpr(0),
                    q_smem,
                    k_smem,
                    v_smem,
                    bars,
                    turn_bars,
                    plan_ptr,
                    out_ptr,
                    lse_ptr,
                    q_scale_ptr,
                    k_scale_ptr,
                    v_scale_ptr,
                    heads,
                    kv_heads,
                    together,
                    scale,
                    soft_cap,
                    window,
                    HAS_Q_SCALE,
                    HAS_KV_SCALE,
                    PER_HEAD,
                    SOFT_CAP,
                    WINDOW,
                    STAGES,
                    D,
                    N,
                    PERMUTE,
                    PING_PONG,
                ),
            ),
            (
                _attend,
                (
                    gl.constexpr(1),
                    q_smem,
                    k_smem,
                    v_smem,
                    bars,
                    turn_bars,
                    plan_ptr,
                    out_ptr,
                    lse_ptr,
                    q_scale_ptr,
                    k_scale_ptr,
                    v_scale_ptr,
                    heads,
                    kv_heads,
                    together,
                    scale,
                    soft_cap,
                    window,
                    HAS_Q_SCALE,
                    HAS_KV_SCALE,
                    PER_HEAD,
                    SOFT_CAP,
                    WINDOW,
                    STAGES,
                    D,
                    N,
                    PERMUTE,
                    PING_PONG,
                ),
            ),
            (
                load_tiles,
                (
                    q_desc,
                    k_desc,
                    v_desc,
                    q_smem,
                    k_smem,
                    v_smem,
                    bars,
                    plan_ptr,
                    table_ptr,
                    table_stride,
                    heads,
                    kv_heads,
                    together,
                    window,
                    STAGES,
                    D,
                    N,
                    PERMUTE,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
