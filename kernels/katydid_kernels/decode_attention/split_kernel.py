"""The decode kernel in plain Triton: each CTA streams the KV tiles its plan gives it, the last piece of a row combines.

Operands are swapped: keys are the left side of the first product and values of the second, so the tensor cores' fixed
64-row side carries tokens (or head_dim) and their narrow side the few query rows of one kv head.  It runs in the
interpreter and is the fallback and the oracle beside the Gluon kernel.

Pieces that cover only part of their item leave (output, maximum, sum) in one of their CTA's two slots (at most the
first and the last piece of a CTA's interval are partial) and count up their item's counter (that of its first CTA);
the last one to arrive adds the partials up and clears the counter, so nothing needs resetting between graph replays.
"""

from __future__ import annotations

import triton
import triton.language as tl

from katydid_kernels.decode_plan import visible_tiles

__all__ = ["decode_split_kernel"]

LOG2E = tl.constexpr(1.4426950408889634)
P_SHIFT = tl.constexpr(8.0)


@triton.jit(do_not_specialize=["batch", "kv_heads", "window", "piece_cost", "table_stride"])
def decode_split_kernel(
    q_ptr,
    q_scale_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    lens_ptr,
    plan_ptr,
    partial_ptr,
    stats_ptr,
    counter_ptr,
    out_ptr,
    lse_ptr,
    batch,
    kv_heads,
    scale,
    soft_cap,
    window,
    piece_cost,
    table_stride,
    page_stride,
    HAS_Q_SCALE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    HAS_KV_SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    Q_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMBINE: tl.constexpr,
    STAGES: tl.constexpr,
):
    cta = tl.program_id(0)
    record = plan_ptr + cta * 16
    row = tl.load(record)
    head = tl.load(record + 1)
    first = tl.load(record + 2)
    last = tl.load(record + 3)
    index = tl.load(record + 4)
    count = tl.load(record + 5)
    left = tl.load(record + 6)
    interval = tl.load(record + 7)

    n = tl.arange(0, ROWS)
    query = n // GROUP
    d = tl.arange(0, HEAD_DIM)
    slot_of_page = tl.arange(0, 64)
    heads = kv_heads * GROUP
    fp8: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    live = n < Q_LEN * GROUP

    while row < batch:
        length = tl.load(lens_ptr + row)
        token_row = row * Q_LEN + query
        out_row = (token_row * heads + head * GROUP + n % GROUP).to(tl.int64)
        q = tl.load(q_ptr + out_row[None, :] * HEAD_DIM + d[:, None], mask=live[None, :], other=0.0)
        factor = tl.full([ROWS], scale, tl.float32)
        if HAS_Q_SCALE:
            factor *= tl.load(q_scale_ptr + out_row, mask=live, other=0.0)
        if HAS_KV_SCALE:
            factor *= tl.load(k_scale_ptr + head * PER_HEAD)
        if not SOFT_CAP:
            factor *= LOG2E
        position = tl.where(live, length - Q_LEN + query, -1)
        oldest = tl.where(window > 0, position - window, -1)

        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([HEAD_DIM, ROWS], tl.float32)
        table = table_ptr + row.to(tl.int64) * table_stride
        for tile in tl.range(first, last, num_stages=STAGES):
            page = tl.load(table + tile)
            at = page.to(tl.int64) * page_stride + head.to(tl.int64) * (64 * HEAD_DIM)
            token = tile * 64 + slot_of_page
            inside = token < length
            k = tl.load(k_ptr + at + slot_of_page[:, None] * HEAD_DIM + d[None, :], mask=inside[:, None], other=0.0)
            # Loaded whole and then cleared: a mask along the contiguous axis would make the load go byte by byte.
            v = tl.load(v_ptr + at + d[:, None] * 64 + slot_of_page[None, :])
            v = tl.where(inside[None, :], v, tl.zeros_like(v))
            s = tl.dot(k, q, input_precision="ieee") * factor[None, :]
            if SOFT_CAP:
                s = soft_cap * LOG2E * (2.0 / (1.0 + tl.exp2(-2.0 * LOG2E * s / soft_cap)) - 1.0)
            visible = (token[:, None] <= position[None, :]) & (token[:, None] > oldest[None, :]) & inside[:, None]
            s = tl.where(visible, s, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(s, 0))
            finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) - (P_SHIFT if fp8 else 0.0)
            p = tl.exp2(s - finite[None, :])
            keep = tl.exp2(maximum - (P_SHIFT if fp8 else 0.0) - finite)
            total = total * keep + tl.sum(p, 0)
            acc = acc * keep[None, :] + tl.dot(v, p.to(v.dtype), input_precision="ieee")
            maximum = new_maximum

        done = count == 1
        if count > 1:
            slot = (2 * cta + (index == 0).to(tl.int32)).to(tl.int64)
            tl.store(partial_ptr + slot * (ROWS * HEAD_DIM) + d[:, None] * ROWS + n[None, :], acc)
            tl.store(stats_ptr + slot * (2 * ROWS) + n, maximum)
            tl.store(stats_ptr + slot * (2 * ROWS) + ROWS + n, total)
            tl.debug_barrier()
            counter = counter_ptr + 2 * (cta - index)
            arrived = tl.atomic_add(counter, 1, sem="acq_rel")
            done = arrived == count - 1
            if done:
                tl.store(counter, 0)
                first_cta = cta - index
                maximum = tl.full([ROWS], float("-inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                acc = tl.zeros([HEAD_DIM, ROWS], tl.float32)
                lane = tl.arange(0, COMBINE)
                for i in range(0, count, COMBINE):
                    piece = i + lane
                    valid = piece < count
                    slots = (2 * (first_cta + piece) + (piece == 0).to(tl.int32)).to(tl.int64)
                    stats = stats_ptr + slots[:, None] * (2 * ROWS) + n[None, :]
                    m = tl.load(stats, mask=valid[:, None], other=float("-inf"), cache_modifier=".cg")
                    t = tl.load(stats + ROWS, mask=valid[:, None], other=0.0, cache_modifier=".cg")
                    part = tl.load(
                        partial_ptr
                        + slots[:, None, None] * (ROWS * HEAD_DIM)
                        + d[None, :, None] * ROWS
                        + n[None, None, :],
                        mask=valid[:, None, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    new_maximum = tl.maximum(maximum, tl.max(m, 0))
                    finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
                    keep = tl.exp2(maximum - finite)
                    weight = tl.exp2(m - finite[None, :])
                    total = total * keep + tl.sum(t * weight, 0)
                    acc = acc * keep[None, :] + tl.sum(part * weight[:, None, :], 0)
                    maximum = new_maximum
        if done:
            inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
            if HAS_KV_SCALE:
                inverse *= tl.load(v_scale_ptr + head * PER_HEAD)
            result = acc * inverse[None, :]
            tl.store(
                out_ptr + out_row[None, :] * HEAD_DIM + d[:, None],
                result.to(out_ptr.dtype.element_ty),
                mask=live[None, :],
            )
            log_sum = (maximum + tl.log2(tl.where(total == 0.0, 1.0, total)) - (P_SHIFT if fp8 else 0.0)) / LOG2E
            tl.store(lse_ptr + out_row, log_sum, mask=live)

        row += ((head + 1) == kv_heads).to(tl.int32)
        head = tl.where(head + 1 == kv_heads, 0, head + 1)
        left -= piece_cost
        row = tl.where(left > 0, row, batch)
        if row < batch:
            first, tiles = visible_tiles(tl.load(lens_ptr + row), Q_LEN, window)
            take = tl.minimum(tiles, left)
            last = first + take
            index = 0
            count = 1 + (tiles - take + interval - 1) // interval
            left -= take
