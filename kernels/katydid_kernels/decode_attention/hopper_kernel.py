"""Decode on Hopper: one warp streams pages through TMA across piece borders, one warpgroup computes behind it.

The loading warp walks the plan on its own and never waits for a combine, so memory stays busy while a piece ends and
the next begins.  Operands are swapped, `S^T = K Q^T` and `O^T = V^T P^T`: tokens and head_dim take the tensor cores'
fixed 64-row side, the few query rows of a kv head the narrow one.  In fp8 every output product goes to a fresh tile
that is added in fp32, because the tensor cores keep about 22 bits of their own accumulators.

Launched with programmatic overlap, a CTA may start while the preceding kernel still runs: it then streams the pages
that hold no new token, and only the queries, the newest pages and the scratch wait for that kernel's end.
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

__all__ = ["decode_hopper_kernel"]

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _output_tile(v_tile, p_smem, D: gl.constexpr, PAGES: gl.constexpr, PAIRED: gl.constexpr, mma: gl.constexpr):
    """Issue `V^T P^T` of one stage; a pair of `[D / 2, ROWS]` where even and odd head_dims share a row of V."""
    ROWS: gl.constexpr = p_smem.shape[0]
    HALVES: gl.constexpr = 2 if PAIRED else 1
    SIZE: gl.constexpr = D // HALVES
    tiles = ()
    for half in gl.static_range(HALVES):
        o = gl.zeros([SIZE, ROWS], gl.float32, mma)
        for page in gl.static_range(PAGES):
            v = v_tile.slice(page * SIZE, SIZE).slice(half * 64, 64, dim=1)
            p = p_smem.slice(page * 64, 64, dim=1).permute((1, 0))
            o = warpgroup_mma(v, p, o, use_acc=page > 0, is_async=True)
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
    p_smem,
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
    Q_LEN: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    UNROLL: gl.constexpr,
    PAIRED: gl.constexpr,
):
    dtype: gl.constexpr = k_smem.dtype
    bits: gl.constexpr = dtype.primitive_bitwidth
    SHIFT: gl.constexpr = 8.0 if bits == 8 else 0.0
    TOKENS: gl.constexpr = PAGES * 64
    vec: gl.constexpr = 128 // bits
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 256 // bits])
    n_layout: gl.constexpr = gl.SliceLayout(0, mma)
    m_layout: gl.constexpr = gl.SliceLayout(1, mma)
    q_layout: gl.constexpr = gl.BlockedLayout([1, vec], [32 * vec // D, D // vec], [4, 1], [1, 0])
    k_layout: gl.constexpr = gl.NVMMASharedLayout(min(128, D * bits // 8), bits, 2)

    heads = kv_heads * GROUP
    n = gl.arange(0, ROWS, n_layout)
    LIVE: gl.constexpr = Q_LEN * GROUP
    live = n < LIVE
    token = gl.arange(0, TOKENS, m_layout)
    qn = gl.arange(0, ROWS, gl.SliceLayout(1, q_layout))
    qd = gl.arange(0, D, gl.SliceLayout(0, q_layout))
    d = gl.arange(0, D, m_layout)
    if PAIRED:
        d = d % (D // 2) * 2 + d // (D // 2)
    row, head, first, last, index, count, left, interval, length = first_piece(plan_ptr)
    gdc_wait()
    gdc_launch_dependents()
    step = 0
    while row < batch:
        out_row = ((row * Q_LEN + n // GROUP) * heads + head * GROUP + n % GROUP).to(gl.int64)
        q_row = ((row * Q_LEN + qn // GROUP) * heads + head * GROUP + qn % GROUP).to(gl.int64)
        q = gl.load(q_ptr + q_row[:, None] * D + qd[None, :], mask=(qn < LIVE)[:, None], other=0.0)
        factor = gl.full([ROWS], scale, gl.float32, n_layout)
        if HAS_Q_SCALE:
            factor *= gl.load(q_scale_ptr + out_row, mask=live, other=0.0)
        if HAS_KV_SCALE:
            factor *= gl.load(k_scale_ptr + head * PER_HEAD)
        if not SOFT_CAP:
            factor *= LOG2E
        q_smem.store(q)
        fence_async_shared()
        gl.thread_barrier()
        position = gl.where(live, length - Q_LEN + n // GROUP, -1)
        oldest = gl.where(window > 0, position - window, -1)
        maximum = gl.full([ROWS], float("-inf"), gl.float32, n_layout)
        weights = gl.zeros([TOKENS, ROWS], gl.float32, mma)
        acc = gl.zeros([D, ROWS], gl.float32, mma)
        for tile in range(first, last, PAGES):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            k = k_smem.index(stage)._reinterpret(dtype, [TOKENS, D], k_layout)
            s = warpgroup_mma(
                k, q_smem.permute((1, 0)), gl.zeros([TOKENS, ROWS], gl.float32, mma), use_acc=False, is_async=True
            )
            s = warpgroup_mma_wait(0, deps=[s])
            s = s * factor[None, :]
            if SOFT_CAP:
                s = soft_cap * LOG2E * (1.0 - 2.0 / (1.0 + gl.exp2(s * (2.0 * LOG2E / soft_cap))))
            end = gl.minimum(last * 64, length)
            if ((tile + PAGES) * 64 > gl.minimum(end, length - Q_LEN)) | (window > 0):
                at = tile * 64 + token
                visible = (at[:, None] <= position[None, :]) & (at[:, None] > oldest[None, :]) & (at < end)[:, None]
                s = gl.where(visible, s, float("-inf"))
                clear_unwritten(v_smem.index(stage), end - tile * 64, PAGES)
            new_maximum = gl.maximum(maximum, gl.max(s, 0))
            finite = gl.where(new_maximum == float("-inf"), 0.0, new_maximum) - SHIFT
            p = gl.exp2(s - finite[None, :])
            keep = gl.exp2(maximum - SHIFT - finite)
            maximum = new_maximum
            p_smem.permute((1, 0)).store(p.to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            o = _output_tile(v_smem.index(stage), p_smem, D, PAGES, PAIRED, mma)
            weights = weights * keep[None, :] + p
            acc = acc * keep[None, :]
            if PAIRED:
                even, odd = warpgroup_mma_wait(0, deps=o)
                o = gl.join(even, odd).permute((2, 0, 1)).reshape([D, ROWS])
                acc += gl.convert_layout(o, mma, assert_trivial=True)
            else:
                acc += warpgroup_mma_wait(0, deps=o)
            mbarrier.arrive(empty.index(stage))
            step += 1

        total = gl.sum(weights, 0)
        done = count == 1
        if count > 1:
            done, maximum, total, acc = combine_pieces(
                partial_ptr, stats_ptr, counter_ptr, index, count, maximum, total, acc, LIVE, False, UNROLL
            )
        if done:
            scale_v = 1.0
            if HAS_KV_SCALE:
                scale_v = gl.load(v_scale_ptr + head * PER_HEAD)
            scales = None if out_scale_ptr is None else out_scale_ptr + row * Q_LEN
            write_rows(out_ptr, scales, lse_ptr, out_row, maximum, total, acc, scale_v, d, LIVE, GROUP, False, SHIFT)
        row, head, first, last, count, left, length = next_piece(
            row, head, left, interval, batch, kv_heads, lens_ptr, window, piece_cost, Q_LEN
        )
        index = 0


@gluon.jit(
    do_not_specialize=["batch", "kv_heads", "window", "piece_cost", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "lse_ptr", "out_scale_ptr"],
)
def decode_hopper_kernel(
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
    Q_LEN: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    BOX: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    UNROLL: gl.constexpr,
    PAIRED: gl.constexpr,
):
    dtype: gl.constexpr = k_desc.dtype
    bits: gl.constexpr = dtype.primitive_bitwidth
    V_ROWS: gl.constexpr = v_desc.block_shape[0]
    V_WIDTH: gl.constexpr = v_desc.block_shape[1]
    k_layout: gl.constexpr = gl.NVMMASharedLayout(BOX * bits // 8, bits, 2)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(64 * bits // 8, bits, 2)
    q_smem = gl.allocate_shared_memory(dtype, [ROWS, D], k_layout)
    p_smem = gl.allocate_shared_memory(dtype, [ROWS, PAGES * 64], p_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, PAGES * (D // BOX) * 64, BOX], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, PAGES * V_ROWS, V_WIDTH], v_desc.layout)
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
                    p_smem,
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
                    Q_LEN,
                    GROUP,
                    ROWS,
                    D,
                    PAGES,
                    STAGES,
                    UNROLL,
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
                    False,
                ),
            ),
        ],
        [1],
        [40],
    )
