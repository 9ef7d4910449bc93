"""The prefill kernel in plain Triton: one program a (query tile, head), one page of keys at a time.

It runs in the interpreter and is the fallback and the oracle beside the Gluon kernel; the tiles come from the same
plan.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["prefill_tile_kernel"]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["heads", "kv_heads", "table_stride", "window"])
def prefill_tile_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    plan_ptr,
    table_ptr,
    out_ptr,
    lse_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    heads,
    kv_heads,
    table_stride,
    scale,
    soft_cap,
    window,
    HAS_Q_SCALE: tl.constexpr,
    HAS_KV_SCALE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    place = tl.program_id(0)
    head = tl.program_id(1)
    if place < tl.load(plan_ptr):
        record = plan_ptr + (1 + place) * 8
        row = tl.load(record)
        q_first = tl.load(record + 1)
        q_end = tl.load(record + 2)
        position = tl.load(record + 3)
        length = tl.load(record + 4)
        kv_head = head // (heads // kv_heads)
        fp8: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
        shift: tl.constexpr = 8.0 if fp8 else 0.0

        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, D)
        n = tl.arange(0, 64)
        live = q_first + m < q_end
        at = tl.where(live, position + m, -1)
        offset = ((q_first + m).to(tl.int64) * heads + head) * D
        q = tl.load(q_ptr + offset[:, None] + d[None, :], mask=live[:, None], other=0.0)
        factor = tl.full([BLOCK_M], scale, tl.float32)
        if HAS_Q_SCALE:
            factor *= tl.load(q_scale_ptr + (q_first + m) * heads + head, mask=live, other=0.0)
        if HAS_KV_SCALE:
            factor *= tl.load(k_scale_ptr + kv_head * PER_HEAD)
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        first = tl.where(window > 0, tl.maximum(position - window + 1, 0) // 64, 0)
        last = (tl.minimum(position + BLOCK_M, length) + 63) // 64
        for tile in range(first, last):
            page = tl.load(table_ptr + row.to(tl.int64) * table_stride + tile)
            base = (page.to(tl.int64) * kv_heads + kv_head) * (64 * D)
            token = tile * 64 + n
            written = token < length
            k = tl.load(k_ptr + base + n[None, :] * D + d[:, None], mask=written[None, :], other=0.0)
            # Loaded whole and then cleared: a mask along the contiguous axis would make the load go byte by byte.
            v = tl.load(v_ptr + base + d[None, :] * 64 + n[:, None])
            v = tl.where(written[:, None], v, tl.zeros_like(v))
            s = tl.dot(q, k, input_precision="ieee") * factor[:, None]
            if SOFT_CAP:
                s = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * LOG2E / soft_cap))))
            visible = (token[None, :] <= at[:, None]) & ((token[None, :] > at[:, None] - window) | (window == 0))
            s = tl.where(visible, s * LOG2E, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(s, 1))
            finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            p = tl.exp2(s - finite[:, None] + shift)
            keep = tl.exp2(maximum - finite)
            total = total * keep + tl.sum(p, 1)
            acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            maximum = new_maximum
        seen = total > 0.0
        inverse = 1.0 / tl.where(seen, total, 1.0)
        if HAS_KV_SCALE:
            inverse *= tl.load(v_scale_ptr + kv_head * PER_HEAD)
        result = (acc * inverse[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offset[:, None] + d[None, :], result, mask=live[:, None])
        log_sum = tl.where(seen, (maximum + tl.log2(tl.where(seen, total, 1.0)) - shift) / LOG2E, float("-inf"))
        tl.store(lse_ptr + (q_first + m) * heads + head, log_sum, mask=live)
