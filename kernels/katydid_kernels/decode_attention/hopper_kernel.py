"""Decode on Hopper: one warp streams pages through TMA across piece borders, one warpgroup computes behind it.

The loading warp walks the plan on its own and never waits for a combine, so memory stays busy while a piece ends and the
next begins.  Operands are swapped as in the split kernel: tokens and head_dim take the tensor cores' 64-row side.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["decode_hopper_kernel"]

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _tiles(length, q_len, window):
    first = gl.where(window > 0, gl.maximum(length - q_len - window + 1, 0) // 64, 0)
    return first, gl.maximum((length + 63) // 64 - first, 1)


@gluon.jit
def _next_piece(row, head, left, interval, batch, kv_heads, lens_ptr, q_len, window, piece_cost):
    row += ((head + 1) == kv_heads).to(gl.int32)
    head = gl.where(head + 1 == kv_heads, 0, head + 1)
    left -= piece_cost
    row = gl.where(left > 0, row, batch)
    length = gl.load(lens_ptr + row, mask=row < batch, other=0)
    base, tiles = _tiles(length, q_len, window)
    take = gl.minimum(tiles, left)
    count = 1 + (tiles - take + interval - 1) // interval
    return row, head, left - take, length, base, gl.minimum(base + take, (length + 63) // 64), count


@gluon.jit
def _stream_pages(
    k_desc, v_desc, k_smem, v_smem, full, empty, table_ptr, lens_ptr, plan_ptr, batch, kv_heads, table_stride, window,
    piece_cost, Q_LEN: gl.constexpr, D: gl.constexpr, DB: gl.constexpr, PAGES: gl.constexpr, STAGES: gl.constexpr,
):
    KB: gl.constexpr = D // DB
    page_bytes: gl.constexpr = 2 * 64 * D * k_desc.dtype.primitive_bitwidth // 8
    record = plan_ptr + gl.program_id(0) * 8
    row = gl.load(record)
    head = gl.load(record + 1)
    first = gl.load(record + 2)
    last = gl.load(record + 3)
    left = gl.load(record + 6)
    interval = gl.load(record + 7)
    length = gl.load(lens_ptr + row, mask=row < batch, other=0)
    i = 0
    while row < batch:
        table = table_ptr + row.to(gl.int64) * table_stride
        end = last
        for tile in range(first, end, PAGES):
            stage = i % STAGES
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
            pages = gl.minimum(end - tile, PAGES)
            for n in gl.static_range(1, PAGES + 1):
                mbarrier.expect(full.index(stage), page_bytes * n, pred=pages == n)
            for p in gl.static_range(PAGES):
                page = gl.load(table + tile + p, mask=p < pages, other=0)
                for c in gl.static_range(KB):
                    tma.async_copy_global_to_shared(
                        k_desc, [(page * kv_heads + head) * 64, c * DB], full.index(stage),
                        k_smem.index(stage).slice((c * PAGES + p) * 64, 64), pred=p < pages,
                    )
                tma.async_copy_global_to_shared(
                    v_desc, [(page * kv_heads + head) * D, 0], full.index(stage),
                    v_smem.index(stage).slice(p * D, D), pred=p < pages,
                )
            i += 1
        row, head, left, length, first, last, count = _next_piece(
            row, head, left, interval, batch, kv_heads, lens_ptr, Q_LEN, window, piece_cost
        )


@gluon.jit
def _attend(
    q_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, q_smem, k_smem, v_smem, p_smem, full, empty, lens_ptr, plan_ptr,
    partial_ptr, stats_ptr, counter_ptr, out_ptr, lse_ptr, batch, kv_heads, scale, soft_cap, window, piece_cost,
    HAS_Q_SCALE: gl.constexpr, HAS_KV_SCALE: gl.constexpr, K_PER_HEAD: gl.constexpr, SOFT_CAP: gl.constexpr,
    Q_LEN: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, PAGES: gl.constexpr,
    STAGES: gl.constexpr, COMBINE: gl.constexpr,
):
    dtype: gl.constexpr = k_smem.dtype
    bits: gl.constexpr = dtype.primitive_bitwidth
    SHIFT: gl.constexpr = 8.0 if bits == 8 else 0.0
    TOKENS: gl.constexpr = PAGES * 64
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 256 // bits])
    n_layout: gl.constexpr = gl.SliceLayout(0, mma)
    m_layout: gl.constexpr = gl.SliceLayout(1, mma)
    vec: gl.constexpr = 128 // bits
    q_layout: gl.constexpr = gl.BlockedLayout([1, vec], [32 * vec // D, D // vec], [4, 1], [1, 0])
    v_fix: gl.constexpr = gl.BlockedLayout([1, vec], [32 * vec // 64, 64 // vec], [4, 1], [1, 0])
    k_layout: gl.constexpr = gl.NVMMASharedLayout(128, bits, 2)

    cta = gl.program_id(0)
    record = plan_ptr + cta * 8
    row = gl.load(record)
    head = gl.load(record + 1)
    first = gl.load(record + 2)
    last = gl.load(record + 3)
    index = gl.load(record + 4)
    count = gl.load(record + 5)
    left = gl.load(record + 6)
    interval = gl.load(record + 7)
    length = gl.load(lens_ptr + row, mask=row < batch, other=0)

    n = gl.arange(0, ROWS, n_layout)
    live = n < Q_LEN * GROUP
    heads = kv_heads * GROUP
    token = gl.arange(0, TOKENS, m_layout)
    d = gl.arange(0, D, m_layout)
    qn = gl.arange(0, ROWS, gl.SliceLayout(1, q_layout))
    qd = gl.arange(0, D, gl.SliceLayout(0, q_layout))
    zero_s = gl.zeros([TOKENS, ROWS], gl.float32, mma)
    zero_o = gl.zeros([D, ROWS], gl.float32, mma)
    i = 0
    while row < batch:
        out_row = ((row * Q_LEN + n // GROUP) * heads + head * GROUP + n % GROUP).to(gl.int64)
        q_row = ((row * Q_LEN + qn // GROUP) * heads + head * GROUP + qn % GROUP).to(gl.int64)
        q = gl.load(
            q_ptr + q_row[:, None] * D + qd[None, :], mask=(qn < Q_LEN * GROUP)[:, None] & (qd < D)[None, :], other=0.0
        )
        factor = gl.full([ROWS], scale, gl.float32, n_layout)
        if HAS_Q_SCALE:
            factor *= gl.load(q_scale_ptr + out_row, mask=live, other=0.0)
        if HAS_KV_SCALE:
            factor *= gl.load(k_scale_ptr + head * K_PER_HEAD)
        if not SOFT_CAP:
            factor *= LOG2E
        q_smem.store(q)
        fence_async_shared()
        gl.thread_barrier()
        position = gl.where(live, length - Q_LEN + n // GROUP, -1)
        oldest = gl.where(window > 0, position - window, -1)
        maximum = gl.full([ROWS], float("-inf"), gl.float32, n_layout)
        total = gl.full([ROWS], 0.0, gl.float32, n_layout)
        acc = gl.zeros([D, ROWS], gl.float32, mma)
        end = last
        for tile in range(first, end, PAGES):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
            k = k_smem.index(stage)._reinterpret(dtype, [TOKENS, D], k_layout)
            s = warpgroup_mma(k, q_smem.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            s = s * factor[None, :]
            if SOFT_CAP:
                s = soft_cap * LOG2E * (2.0 / (1.0 + gl.exp2(-2.0 * LOG2E * s / soft_cap)) - 1.0)
            at = tile * 64 + token
            edge = ((tile + PAGES) * 64 > length - Q_LEN) | (tile + PAGES > end) | (window > 0)
            if edge:
                visible = (at[:, None] <= position[None, :]) & (at[:, None] > oldest[None, :])
                visible = visible & (at < end * 64)[:, None]
                s = gl.where(visible, s, float("-inf"))
                for p in gl.static_range(PAGES):
                    valid = gl.minimum(length, end * 64) - (tile + p) * 64
                    if valid < 64:
                        v_page = v_smem.index(stage).slice(p * D, D)
                        column = gl.arange(0, 64, gl.SliceLayout(0, v_fix))
                        v = v_page.load(v_fix)
                        v_page.store(gl.where((column < valid)[None, :], v, gl.zeros_like(v)))
                fence_async_shared()
            new_maximum = gl.maximum(maximum, gl.max(s, 0))
            finite = gl.where(new_maximum == float("-inf"), 0.0, new_maximum) - SHIFT
            p = gl.exp2(s - finite[None, :])
            keep = gl.exp2(maximum - SHIFT - finite)
            total = total * keep + gl.sum(p, 0)
            maximum = new_maximum
            p_smem.permute((1, 0)).store(p.to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            o = zero_o
            for p in gl.static_range(PAGES):
                o = warpgroup_mma(
                    v_smem.index(stage).slice(p * D, D), p_smem.slice(p * 64, 64, dim=1).permute((1, 0)), o,
                    use_acc=p > 0, is_async=True,
                )
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(empty.index(stage))
            acc = acc * keep[None, :] + o
            i += 1

        done = count == 1
        if count > 1:
            slot = (2 * cta + (index == 0).to(gl.int32)).to(gl.int64)
            gl.store(partial_ptr + slot * (ROWS * D) + d[:, None] * ROWS + n[None, :], acc)
            gl.store(stats_ptr + slot * (2 * ROWS) + n, maximum)
            gl.store(stats_ptr + slot * (2 * ROWS) + ROWS + n, total)
            gl.thread_barrier()
            counter = counter_ptr + row * kv_heads + head
            done = gl.atomic_add(counter, 1, sem="acq_rel") == count - 1
            if done:
                gl.store(counter, 0)
                maximum = gl.full([ROWS], float("-inf"), gl.float32, n_layout)
                total = gl.full([ROWS], 0.0, gl.float32, n_layout)
                acc = gl.zeros([D, ROWS], gl.float32, mma)
                for j in range(0, count, COMBINE):
                    new_maximum = maximum
                    for c in gl.static_range(COMBINE):
                        piece = gl.minimum(j + c, count - 1)
                        slot = (2 * (cta - index + piece) + (piece == 0).to(gl.int32)).to(gl.int64)
                        m = gl.load(stats_ptr + slot * (2 * ROWS) + n, cache_modifier=".cg")
                        new_maximum = gl.maximum(new_maximum, m)
                    finite = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
                    keep = gl.exp2(maximum - finite)
                    total = total * keep
                    acc = acc * keep[None, :]
                    for c in gl.static_range(COMBINE):
                        piece = gl.minimum(j + c, count - 1)
                        slot = (2 * (cta - index + piece) + (piece == 0).to(gl.int32)).to(gl.int64)
                        m = gl.load(stats_ptr + slot * (2 * ROWS) + n, cache_modifier=".cg")
                        t = gl.load(stats_ptr + slot * (2 * ROWS) + ROWS + n, cache_modifier=".cg")
                        weight = gl.where(j + c < count, gl.exp2(m - finite), 0.0)
                        part = gl.load(
                            partial_ptr + slot * (ROWS * D) + d[:, None] * ROWS + n[None, :], cache_modifier=".cg"
                        )
                        total += t * weight
                        acc += part * weight[None, :]
                    maximum = new_maximum
        if done:
            inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
            if HAS_KV_SCALE:
                inverse *= gl.load(v_scale_ptr + head * K_PER_HEAD)
            result = (acc * inverse[None, :]).to(out_ptr.dtype.element_ty)
            gl.store(out_ptr + out_row[None, :] * D + d[:, None], result, mask=live[None, :])
            gl.store(lse_ptr + out_row, (maximum + gl.log2(total) - SHIFT) / LOG2E, mask=live)
        row, head, left, length, first, last, count = _next_piece(
            row, head, left, interval, batch, kv_heads, lens_ptr, Q_LEN, window, piece_cost
        )
        index = 0


@gluon.jit
def decode_hopper_kernel(
    q_ptr, q_scale_ptr, k_desc, v_desc, k_scale_ptr, v_scale_ptr, table_ptr, lens_ptr, plan_ptr, partial_ptr, stats_ptr,
    counter_ptr, out_ptr, lse_ptr, batch, kv_heads, scale, soft_cap, window, piece_cost, table_stride,
    HAS_Q_SCALE: gl.constexpr, HAS_KV_SCALE: gl.constexpr, K_PER_HEAD: gl.constexpr, SOFT_CAP: gl.constexpr,
    Q_LEN: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, DB: gl.constexpr,
    PAGES: gl.constexpr, STAGES: gl.constexpr, COMBINE: gl.constexpr,
):
    dtype: gl.constexpr = k_desc.dtype
    bits: gl.constexpr = dtype.primitive_bitwidth
    KB: gl.constexpr = D // DB
    k_layout: gl.constexpr = gl.NVMMASharedLayout(128, bits, 2)
    v_layout: gl.constexpr = gl.NVMMASharedLayout(64 * bits // 8, bits, 2)
    q_smem = gl.allocate_shared_memory(dtype, [ROWS, D], k_layout)
    p_smem = gl.allocate_shared_memory(dtype, [ROWS, PAGES * 64], v_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, PAGES * KB * 64, DB], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, PAGES * D, 64], v_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (q_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, q_smem, k_smem, v_smem, p_smem, full, empty,
                       lens_ptr, plan_ptr, partial_ptr, stats_ptr, counter_ptr, out_ptr, lse_ptr, batch, kv_heads,
                       scale, soft_cap, window, piece_cost, HAS_Q_SCALE, HAS_KV_SCALE, K_PER_HEAD, SOFT_CAP, Q_LEN,
                       GROUP, ROWS, D, PAGES, STAGES, COMBINE)),
            (_stream_pages, (k_desc, v_desc, k_smem, v_smem, full, empty, table_ptr, lens_ptr, plan_ptr, batch, kv_heads,
                             table_stride, window, piece_cost, Q_LEN, D, DB, PAGES, STAGES)),
        ],
        [1],
        [40],
    )
