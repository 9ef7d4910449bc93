"""What happens to a row once it is summed: residual, norm, and the form it leaves in."""

import triton
import triton.language as tl

__all__ = ["normed_row", "quantized_row"]


@triton.jit
def normed_row(total, row, residual_ptr, residual_out_ptr, weight_ptr, hidden, eps, BLOCK: tl.constexpr):
    """fp32 ``[BLOCK]``: the row plus its residual, rounded to the residual's dtype and stored, then normed."""
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    place = tl.cast(row, tl.int64) * hidden + column
    total += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(residual_out_ptr.dtype.element_ty)
    tl.store(residual_out_ptr + place, rounded, mask=inside)
    total = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return total * tl.rsqrt(tl.sum(total * total, 0) / hidden + eps) * weight


@triton.jit
def quantized_row(y):
    """e4m3 values and their scale, ``max |y| / 448``."""
    scale = tl.maximum(tl.max(tl.abs(y), 0) / 448.0, 1e-12)
    q = tl.minimum(tl.maximum(y * (1.0 / scale), -448.0), 448.0)
    return q.to(tl.float8e4nv), scale
