"""Sums the results of the pieces of a query tile's list, each weighted by what its scores summed to."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

__all__ = ["ROWS", "combine_kernel"]

ROWS = 8


@triton.jit(do_not_specialize=["heads"])
def combine_kernel(
    partials_ptr, sums_ptr, cuts_ptr, out_ptr, heads, D: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr
):
    """Program (cut tile, head, ``ROWS`` of its 128 queries). partials: fp32 ``[partials, heads, 128, D]``; sums: fp32
    ``[partials, heads, 128]``, logarithms to base 2; cuts: as of `SparsePlan`.

    EARLY: launched while the attention runs.
    """
    cut = cuts_ptr + tl.program_id(0) * 4
    head = tl.program_id(1)
    begin = tl.load(cut)
    parts = tl.load(cut + 1)
    q_first = tl.load(cut + 2)
    q_end = tl.load(cut + 3)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    if EARLY:
        gdc_wait()
    stride = heads.to(tl.int64) * 128
    place = (begin * stride + head * 128) + row
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    for part in range(parts):
        maximum = tl.maximum(maximum, tl.load(sums_ptr + place + part * stride))
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for first in range(0, parts, 4):
        # Four at a time: their reads are under way together.
        for i in tl.static_range(4):
            part = first + i
            at = place + part * stride
            weight = tl.exp2(tl.load(sums_ptr + at, mask=(row >= 0) & (part < parts), other=float("-inf")) - maximum)
            inside = (at >= 0)[:, None] & (part < parts)
            acc += tl.load(partials_ptr + at[:, None] * D + d[None, :], mask=inside, other=0.0) * weight[:, None]
            total += weight
    offset = ((q_first + row).to(tl.int64) * heads + head) * D
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset[:, None] + d[None, :], result, mask=(q_first + row < q_end)[:, None])
