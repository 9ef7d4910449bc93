"""Decode on Hopper for several new tokens: the query rows of a kv head take the tensor cores' 64-row side.

With 32 rows the swapped products of `hopper_kernel` spend their time on turning probabilities around: maxima across
warps, byte stores, fences.  Here a row lies within four lanes, probabilities go from registers into the output product
as in prefill, and one row costs what 64 do.  The plan, the page feed and the combine are the same.
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

from katydid_kernels.decode_attention.feed import clear_unwritten, first_piece, next_piece, stream_pages
from katydid_kernels.decode_attention.partials import combine_pieces, write_rows
from katydid_kernels.prefill_attention.score_tile import (
    LOG2E,
    add_columns,
    cap_scores,
    mask_scores,
    probability_operand,
)

__all__ = ["decode_wide_kernel"]

ROWS = gl.constexpr(64)


@gluon.jit
def _operands(p, dtype: gl.constexpr, PAGES: gl.constexpr, layout: gl.constexpr, PERMUTE: gl.constexpr):
    """The probabilities of each page of a stage as a left operand."""
    if PAGES == 1:
        return (probability_operand(p, dtype, 64, layout, PERMUTE),)
    else:
        first, second = gl.split(p.reshape([ROWS, 2, 64]).permute((0, 2, 1)))
        return (
            probability_operand(first, dtype, 64, layout, PERMUTE),
            probability_operand(second, dtype, 64, layout, PERMUTE),
        )


@gluon.jit
def _output_tile(operands, v_tile, D: gl.constexpr, PAGES: gl.constexpr, PAIRED: gl.constexpr, layout: gl.constexpr):
    """Issue `P V` of one stage; a pair of `[ROWS, D / 2]` where even and odd head_dims share a row of V."""
    HALVES: gl.constexpr = 2 if PAIRED else 1
    SIZE: gl.constexpr = D // HALVES
    tiles = ()
    for half in gl.static_range(HALVES):
        o = gl.zeros([ROWS, SIZE], gl.float32, layout)
        for page in gl.static_range(PAGES):
            v = v_tile.slice(page * SIZE, SIZE).slice(half * 64, 64, dim=1).permute((1, 0))
            o = warpgroup_mma(operands[page], v, o, use_acc=page > 0, is_async=True)
        tiles += (o,)  # type: ignore[assignment]
    return tiles


@gluon.jit
def _attend(
    q_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_smem,
    k_smem,
    v_smem,
    full,
    empty,
    lens_ptr,
    plan_ptr,
    partial_ptr,
    stats_ptr,
    counter_ptr,
    out_ptr,
    out_scale_ptr,
    lse_ptr,
    batch,
    kv_heads,
    scale,
    soft_cap,
    window,
    piece_cost,
    HAS_Q_SCALE: gl.constexpr,
    HAS_KV_SCALE: gl.constexpr,
    PER_HEAD: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    WINDOW: gl.constexpr,
    Q_LEN: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    UNROLL: gl.constexpr,
    PERMUTE: gl.constexpr,
    PAIRED: gl.constexpr,
):
    dtype: gl.constexpr = k_smem.dtype
    bits: gl.constexpr = dtype.primitive_bitwidth
    SHIFT: gl.constexpr = 8.0 if bits == 8 else 0.0
    LIVE: gl.constexpr = Q_LEN * GROUP
    vec: gl.constexpr = 128 // bits
    TOKENS: gl.constexpr = PAGES * 64
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 256 // bits])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2 if PAIRED else D, 256 // bits])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, half_layout, 32 // bits)
    k_layout: gl.constexpr = gl.NVMMASharedLayout(min(128, D * bits // 8), bits, 2)
    q_layout: gl.constexpr = gl.BlockedLayout([1, vec], [32 * vec // D, D // vec], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)

    heads = kv_heads * GROUP
    n = gl.arange(0, ROWS, row_layout)
    qn = gl.arange(0, ROWS, gl.SliceLayout(1, q_layout))
    qd = gl.arange(0, D, gl.SliceLayout(0, q_layout))
    nothing = gl.zeros([ROWS, D // 2 if PAIRED else D], gl.float32, half_layout)
    if PAIRED:
        nothing = gl.join(nothing, nothing).reshape([ROWS, D])
    o_row: gl.constexpr = gl.SliceLayout(1, nothing.type.layout)
    d = gl.arange(0, D, gl.SliceLayout(0, nothing.type.layout))
    row, head, first, last, index, count, left, interval, length = first_piece(plan_ptr)
    gdc_wait()
    gdc_launch_dependents()
    step = 0
    while row < batch:
        q_row = ((row * Q_LEN + qn // GROUP) * heads + head * GROUP + qn % GROUP).to(gl.int64)
        q = gl.load(q_ptr + q_row[:, None] * D + qd[None, :], mask=(qn < LIVE)[:, None], other=0.0)
        factor = gl.full([ROWS], scale, gl.float32, row_layout)
        if HAS_Q_SCALE:
            scale_row = (row * Q_LEN + n // GROUP) * heads + head * GROUP + n % GROUP
            factor *= gl.load(q_scale_ptr + scale_row, mask=n < LIVE, other=0.0)
        if HAS_KV_SCALE:
            factor *= gl.load(k_scale_ptr + head * PER_HEAD)
        factor = gl.maximum(factor, 1e-30)
        q_smem.store(q)
        fence_async_shared()
        gl.thread_barrier()
        if SOFT_CAP:
            unit = gl.full([ROWS], 1.0, gl.float32, row_layout)
        else:
            unit = factor * LOG2E
        position = gl.where(n < LIVE, length - Q_LEN + n // GROUP, -1)
        maximum = gl.full([ROWS], -1e30, gl.float32, row_layout)
        p = gl.zeros([ROWS, TOKENS], gl.float32, s_layout)
        columns = gl.sum(p.reshape([ROWS, TOKENS // 8, 8]), 1)
        acc = nothing
        for tile in range(first, last, PAGES):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            k = k_smem.index(stage)._reinterpret(dtype, [TOKENS, D], k_layout)
            s = warpgroup_mma(q_smem, k.permute((1, 0)), p, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            if SOFT_CAP:
                s = cap_scores(s * factor[:, None], soft_cap)
            end = gl.minimum(last * 64, length) - tile * 64
            if (gl.minimum(end, length - Q_LEN - tile * 64) < TOKENS) | WINDOW:
                newest = position - tile * 64
                s = mask_scores(s, gl.minimum(newest, end - 1), newest - window, WINDOW, PERMUTE)
                if end < TOKENS:
                    clear_unwritten(v_smem.index(stage), end, PAGES)
            new_maximum = gl.maximum(maximum, gl.max(s, 1) * unit)
            p = gl.exp2(s * unit[:, None] - (new_maximum - SHIFT)[:, None])
            shrink = gl.exp2(maximum - new_maximum)
            maximum = new_maximum
            operands = _operands(p, dtype, PAGES, p_layout, PERMUTE)
            o = _output_tile(operands, v_smem.index(stage), D, PAGES, PAIRED, half_layout)
            columns = add_columns(columns, p, shrink, TOKENS)
            acc = acc * gl.convert_layout(shrink, o_row)[:, None]
            if PAIRED:
                even, odd = warpgroup_mma_wait(0, deps=o)
                acc += gl.join(even, odd).reshape([ROWS, D])
            else:
                acc += warpgroup_mma_wait(0, deps=o)
            mbarrier.arrive(empty.index(stage))
            step += 1

        row_maximum = gl.convert_layout(maximum, o_row)
        total = gl.convert_layout(gl.sum(columns, 1), o_row)
        done = count == 1
        if count > 1:
            done, row_maximum, total, acc = combine_pieces(
                partial_ptr, stats_ptr, counter_ptr, index, count, row_maximum, total, acc, LIVE, True, UNROLL
            )
        if done:
            scale_v = 1.0
            if HAS_KV_SCALE:
                scale_v = gl.load(v_scale_ptr + head * PER_HEAD)
            on = gl.arange(0, ROWS, o_row)
            out_row = ((row * Q_LEN + on // GROUP) * heads + head * GROUP + on % GROUP).to(gl.int64)
            scales = None if out_scale_ptr is None else out_scale_ptr + row * Q_LEN
            write_rows(out_ptr, scales, lse_ptr, out_row, row_maximum, total, acc, scale_v, d, LIVE, GROUP, True, SHIFT)
        row, head, first, last, count, left, length = next_piece(
            row, head, left, interval, batch, kv_heads, lens_ptr, window, piece_cost, Q_LEN
        )
        index = 0


@gluon.jit(
    do_not_specialize=["batch", "kv_heads", "window", "piece_cost", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "lse_ptr", "out_scale_ptr"],
)
def decode_wide_kernel(
    q_ptr,
    q_scale_ptr,
    k_desc,
    v_desc,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    lens_ptr,
    plan_ptr,
    partial_ptr,
    stats_ptr,
    counter_ptr,
    out_ptr,
    out_scale_ptr,
    lse_ptr,
    batch,
    kv_heads,
    scale,
    soft_cap,
    window,
    piece_cost,
    table_stride,
    HAS_Q_SCALE: gl.constexpr,
    HAS_KV_SCALE: gl.constexpr,
    PER_HEAD: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    WINDOW: gl.constexpr,
    Q_LEN: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BOX: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    UNROLL: gl.constexpr,
    PERMUTE: gl.constexpr,
    PAIRED: gl.constexpr,
):
    dtype: gl.constexpr = k_desc.dtype
    bits: gl.constexpr = dtype.primitive_bitwidth
    k_layout: gl.constexpr = gl.NVMMASharedLayout(BOX * bits // 8, bits, 2)
    q_smem = gl.allocate_shared_memory(dtype, [ROWS, D], k_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, (D // BOX) * PAGES * 64, BOX], k_layout)
    v_smem = gl.allocate_shared_memory(
        dtype, [STAGES, PAGES * v_desc.block_shape[0], v_desc.block_shape[1]], v_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q_ptr,
                    q_scale_ptr,
                    k_scale_ptr,
                    v_scale_ptr,
                    q_smem,
                    k_smem,
                    v_smem,
                    full,
                    empty,
                    lens_ptr,
                    plan_ptr,
                    partial_ptr,
                    stats_ptr,
                    counter_ptr,
                    out_ptr,
                    out_scale_ptr,
                    lse_ptr,
                    batch,
                    kv_heads,
                    scale,
                    soft_cap,
                    window,
                    piece_cost,
                    HAS_Q_SCALE,
                    HAS_KV_SCALE,
                    PER_HEAD,
                    SOFT_CAP,
                    WINDOW,
                    Q_LEN,
                    GROUP,
                    D,
                    PAGES,
                    STAGES,
                    UNROLL,
                    PERMUTE,
                    PAIRED,
                ),
            ),
            (
                stream_pages,
                (
                    k_desc,
                    v_desc,
                    k_smem,
                    v_smem,
                    full,
                    empty,
                    table_ptr,
                    lens_ptr,
                    plan_ptr,
                    batch,
                    kv_heads,
                    table_stride,
                    window,
                    piece_cost,
                    Q_LEN,
                    D,
                    BOX,
                    PAGES,
                    STAGES,
                    PERMUTE,
                ),
            ),
        ],
        [1],
        [40],
    )
