"""Block-sparse prefill on Hopper: the dense kernel's pipeline over listed blocks of keys.

One warp feeds pages through TMA, two warpgroups each own 64 queries and overlap both products; see
`prefill_attention.hopper_kernel` for how scores, softmax and output products fall into one another and why fp8 takes a
fresh tile for each output product. Here a tile of queries lies within one block of positions, so only the first block
of its list, its own, needs a mask. A piece of a list leaves its result, normed by its own sum, and the logarithm of
that sum for `combine_kernel`.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from katydid_kernels.block_sparse_prefill.feed import load_listed, sparse_item
from katydid_kernels.prefill_attention.score_tile import (
    LOG2E,
    add_columns,
    mask_scores,
    ordered,
    probability_operand,
)

__all__ = ["sparse_hopper_kernel"]

N = gl.constexpr(128)


@gluon.jit
def _scores(q, k_smem, k_full, stage, phase, into, D: gl.constexpr):
    """Issue the scores of the block in `stage`; they take over the registers of `into`, whose values are lost."""
    bits: gl.constexpr = q.dtype.primitive_bitwidth
    mbarrier.wait(k_full.index(stage), phase)
    k = k_smem.index(stage)._reinterpret(q.dtype, [N, D], gl.NVMMASharedLayout(min(128, D * bits // 8), bits, 2))
    return warpgroup_mma(q, k.permute((1, 0)), into, use_acc=False, is_async=True)


@gluon.jit
def _score_factors(
    valid, rows, head, q_end, kv_head, scale, q_scale_ptr, k_scale_ptr, heads, HAS_Q_SCALE: gl.constexpr,
    HAS_KV_SCALE: gl.constexpr, PER_HEAD: gl.constexpr,
):  # fmt: skip
    """What the scores of each query are multiplied by."""
    factor = gl.full([64], scale, gl.float32, rows.type.layout)
    if HAS_Q_SCALE:
        factor *= gl.load(q_scale_ptr + rows * heads + head, mask=valid & (rows < q_end), other=0.0)
    if HAS_KV_SCALE:
        factor *= gl.load(k_scale_ptr + kv_head * PER_HEAD, mask=valid, other=0.0)
    return factor


@gluon.jit
def _attend(
    which: gl.constexpr, q_smem, k_smem, v_smem, bars, turn_bars, pieces_ptr, out_ptr, partials_ptr, sums_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, items, heads, kv_heads, together, most, scale, HAS_Q_SCALE: gl.constexpr,
    HAS_KV_SCALE: gl.constexpr, PER_HEAD: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, D: gl.constexpr,
    PERMUTE: gl.constexpr, PING_PONG: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
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
    turn = 0
    i = 0
    valid, _row, head, q_first, q_end, position, length, count, begin, _listed, partial = sparse_item(
        pieces_ptr, turn, items, heads, together, most
    )
    group = heads // kv_heads
    if EARLY:
        gdc_wait()
    factor = _score_factors(
        valid, q_first + rows, head, q_end, head // group, scale, q_scale_ptr, k_scale_ptr, heads, HAS_Q_SCALE,
        HAS_KV_SCALE, PER_HEAD,
    )  # fmt: skip
    while valid:
        v_factor = 1.0
        if HAS_KV_SCALE:
            v_factor = gl.load(v_scale_ptr + head // group * PER_HEAD)
        unit = gl.maximum(factor, 1e-30) * LOG2E
        acc = gl.zeros([64, D], gl.float32, o_layout)

        q_stage = turn % Q_STAGES
        q = q_smem.index(q_stage * 2 + which)._reinterpret(dtype, [64, D], q_layout)
        mbarrier.wait(q_full.index(q_stage), (turn // Q_STAGES) & 1)
        nothing = gl.zeros([64, N], gl.float32, s_layout)
        s = _scores(q, k_smem, k_full, i % STAGES, (i // STAGES) & 1, nothing, D)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(i % STAGES))
        if count == 1:
            mbarrier.arrive(q_empty.index(q_stage))
        # Whole blocks lie before a piece's that is not the list's first.
        newest = position % N + rows + gl.where(begin > 0, N, 0)
        s = mask_scores(s, newest, newest, False, PERMUTE)
        maximum = gl.maximum(gl.max(s, 1) * unit, -1e30)
        p32 = gl.exp2(s * unit[:, None] - (maximum - SHIFT)[:, None])
        keep = gl.full([64], 0.0, gl.float32, o_row)
        total = gl.sum(p32.reshape([64, N // 8, 8]), 1)
        valid_tokens = length - position // N * N
        if (begin == 0) & (valid_tokens < N):
            # Both warpgroups clear the block, writing the same bytes: neither has to wait for the other.
            mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
            for pg in gl.static_range(N // 64):
                v_page = v_smem.index(i % STAGES).slice(pg * D, D)
                column = gl.arange(0, 64, gl.SliceLayout(0, v_fix)) + pg * 64
                v = v_page.load(v_fix)
                v_page.store(gl.where((column < valid_tokens)[None, :], v, gl.zeros_like(v)))
            fence_async_shared()
            gl.thread_barrier()
        i += 1
        turn += 1
        upcoming = sparse_item(pieces_ptr, turn, items, heads, together, most)
        for entry in range(1, count):
            before = (i - 1) % STAGES
            p = probability_operand(p32, dtype, N, p_layout, PERMUTE)
            if PING_PONG:
                mbarrier.wait(turn_bars.index(which), ((i - turn + 1) & 1) ^ which)
            s = _scores(q, k_smem, k_full, i % STAGES, (i // STAGES) & 1, p32, D)
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
            if entry == count - 1:
                mbarrier.arrive(q_empty.index(q_stage))
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
        # What the next tile begins with is on its way while this one ends.
        factor = _score_factors(
            upcoming[0], upcoming[3] + rows, upcoming[2], upcoming[4], upcoming[2] // group, scale, q_scale_ptr,
            k_scale_ptr, heads, HAS_Q_SCALE, HAS_KV_SCALE, PER_HEAD,
        )  # fmt: skip
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
            inverse *= v_factor
        acc = acc * gl.convert_layout(inverse, o_row)[:, None]
        if partial < 0:
            offset = ((q_first + o_rows).to(gl.int64) * heads + head) * D
            gl.store(
                out_ptr + offset[:, None] + d[None, :],
                acc.to(out_ptr.dtype.element_ty),
                mask=(q_first + o_rows < q_end)[:, None],
            )
        else:
            place = (partial * heads + head).to(gl.int64) * 128
            gl.store(sums_ptr + place + rows, maximum - SHIFT + gl.log2(total))
            gl.store(partials_ptr + (place + o_rows)[:, None] * D + d[None, :], acc)
        valid, _row, head, q_first, q_end, position, length, count, begin, _listed, partial = upcoming


@gluon.jit(
    do_not_specialize=["items", "heads", "kv_heads", "together", "table_stride", "most"],
    do_not_specialize_on_alignment=["table_ptr"],
)
def sparse_hopper_kernel(
    q_desc, k_desc, v_desc, pieces_ptr, blocks_ptr, table_ptr, out_ptr, partials_ptr, sums_ptr, q_scale_ptr,
    k_scale_ptr, v_scale_ptr, items, heads, kv_heads, together, table_stride, most, scale, HAS_Q_SCALE: gl.constexpr,
    HAS_KV_SCALE: gl.constexpr, PER_HEAD: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, D: gl.constexpr,
    PERMUTE: gl.constexpr, PING_PONG: gl.constexpr, REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    bits: gl.constexpr = dtype.primitive_bitwidth
    DB: gl.constexpr = min(D, 1024 // bits)
    k_layout: gl.constexpr = gl.NVMMASharedLayout(min(128, D * bits // 8), bits, 2)
    v_layout: gl.constexpr = gl.NVMMASharedLayout(64 * bits // 8, bits, 2)
    q_smem = gl.allocate_shared_memory(dtype, [2 * Q_STAGES, D // DB * 64, DB], k_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, D // DB * N, DB], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, N // 64 * D, 64], v_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(q_empty.index(s), count=2)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2)
    for w in gl.static_range(2):
        mbarrier.init(turn_bars.index(w), count=1)
    fence_async_shared()
    if EARLY:
        gdc_launch_dependents()
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (_attend, (
                gl.constexpr(0), q_smem, k_smem, v_smem, bars, turn_bars, pieces_ptr, out_ptr, partials_ptr,
                sums_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, items, heads, kv_heads, together, most, scale,
                HAS_Q_SCALE, HAS_KV_SCALE, PER_HEAD, STAGES, Q_STAGES, D, PERMUTE, PING_PONG, EARLY,
            )),
            (_attend, (
                gl.constexpr(1), q_smem, k_smem, v_smem, bars, turn_bars, pieces_ptr, out_ptr, partials_ptr,
                sums_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, items, heads, kv_heads, together, most, scale,
                HAS_Q_SCALE, HAS_KV_SCALE, PER_HEAD, STAGES, Q_STAGES, D, PERMUTE, PING_PONG, EARLY,
            )),
            (load_listed, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, pieces_ptr, blocks_ptr, table_ptr,
                table_stride, items, heads, kv_heads, together, most, STAGES, Q_STAGES, D, PERMUTE, EARLY,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
