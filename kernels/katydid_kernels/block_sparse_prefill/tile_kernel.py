"""Block-sparse attention in plain Triton: one program a (query tile, head), one page of keys at a time.

It runs in the interpreter and is the fallback and the oracle beside the Gluon kernel.
"""

import triton
import triton.language as tl

__all__ = ["sparse_tile_kernel"]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["heads", "kv_heads", "table_stride", "most"])
def sparse_tile_kernel(
    q_ptr, k_ptr, v_ptr, records_ptr, blocks_ptr, table_ptr, out_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, heads,
    kv_heads, table_stride, most, scale, PER_HEAD: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    record = records_ptr + tl.program_id(0) * 8
    head = tl.program_id(1)
    row = tl.load(record)
    q_first = tl.load(record + 1)
    q_end = tl.load(record + 2)
    position = tl.load(record + 3)
    length = tl.load(record + 4)
    count = tl.load(record + 5)
    listed = blocks_ptr + (tl.load(record + 6).to(tl.int64) * heads + head) * most
    kv_head = head // (heads // kv_heads)
    fp8: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    shift: tl.constexpr = 8.0 if fp8 else 0.0

    m = tl.arange(0, 128)
    d = tl.arange(0, D)
    n = tl.arange(0, 64)
    live = q_first + m < q_end
    at = tl.where(live, position + m, -1)
    offset = ((q_first + m).to(tl.int64) * heads + head) * D
    q = tl.load(q_ptr + offset[:, None] + d[None, :], mask=live[:, None], other=0.0)
    factor = tl.full([128], scale, tl.float32)
    if q_scale_ptr is not None:
        factor *= tl.load(q_scale_ptr + (q_first + m) * heads + head, mask=live, other=0.0)
    if k_scale_ptr is not None:
        factor *= tl.load(k_scale_ptr + kv_head * PER_HEAD)
    maximum = tl.full([128], float("-inf"), tl.float32)
    total = tl.zeros([128], tl.float32)
    acc = tl.zeros([128, D], tl.float32)
    for half in range(2 * count):
        first = tl.load(listed + half // 2) * 128 + half % 2 * 64
        if first < length:
            page = tl.load(table_ptr + row.to(tl.int64) * table_stride + first // 64)
            base = (page.to(tl.int64) * kv_heads + kv_head) * (64 * D)
            token = first + n
            written = token < length
            k = tl.load(k_ptr + base + n[None, :] * D + d[:, None], mask=written[None, :], other=0.0)
            # Loaded whole and then cleared: a mask along the contiguous axis would make the load go byte by byte.
            v = tl.load(v_ptr + base + d[None, :] * 64 + n[:, None])
            v = tl.where(written[:, None], v, tl.zeros_like(v))
            s = tl.dot(q, k, input_precision="ieee") * factor[:, None]
            s = tl.where(token[None, :] <= at[:, None], s * LOG2E, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(s, 1))
            finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            p = tl.exp2(s - finite[:, None] + shift)
            keep = tl.exp2(maximum - finite)
            total = total * keep + tl.sum(p, 1)
            acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            maximum = new_maximum
    inverse = 1.0 / tl.where(total > 0.0, total, 1.0)
    if v_scale_ptr is not None:
        inverse *= tl.load(v_scale_ptr + kv_head * PER_HEAD)
    result = (acc * inverse[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset[:, None] + d[None, :], result, mask=live[:, None])
