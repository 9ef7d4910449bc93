"""The weighted sum that ends a mixture of experts: each token reads the rows its pairs went to, in order of choice.

Bound by memory: top_k rows read for one written. The sum is in fp32 and rounded once, so a token's bits depend neither
on the batch nor on the order the experts ran in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

__all__ = ["combine", "combine_reference"]


def combine(
    y: Tensor,
    slots: Tensor,
    weights: Tensor,
    out: Tensor,
    *,
    shared: Tensor | None = None,
    early: bool = False,
    paired: bool = False,
) -> Tensor:
    """``out[t] = sum over j of weights[t, j] * y[slots[t, j]]  (+ shared[t])``, pairs with slot -1 left out.

    Args:
        y: ``[rows, n]``, rows contiguous.
        slots: int32 ``[T, top_k]``.
        weights: fp32 ``[T, top_k]``.
        out, shared: ``[T, n]``, rows contiguous.
        paired: columns of y stand as `experts_pairs` says; n is a multiple of 128.
        early: launch before the kernel that writes y has ended, and wait for it (PDL); for one launched just before.
    """
    tokens, n = out.shape
    block = min(1024, triton.next_power_of_2(n))
    if tokens:
        _combine_kernel[(tokens, triton.cdiv(n, block))](
            y, slots, weights, shared, out, n, y.stride(0), out.stride(0), 0 if shared is None else shared.stride(0),
            TOP_K=slots.shape[1], BLOCK=block, EARLY=early and y.is_cuda, PAIRED=paired, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out


@triton.jit
def _combine_kernel(
    y_ptr, slots_ptr, weights_ptr, shared_ptr, out_ptr, n, y_row_stride, out_row_stride, shared_row_stride,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    col = first + tl.arange(0, BLOCK)
    if PAIRED:
        # The even columns of every 128 stand before the odd ones: half a block of each, then side by side again.
        half = tl.arange(0, BLOCK // 2)
        place = first + half // 64 * 128 + half % 64
        even = _sum_rows(y_ptr, slots_ptr, weights_ptr, token, place, n, y_row_stride, TOP_K, BLOCK // 2)
        odd = _sum_rows(y_ptr, slots_ptr, weights_ptr, token, place + 64, n, y_row_stride, TOP_K, BLOCK // 2)
        total = tl.interleave(even, odd)
    else:
        total = _sum_rows(y_ptr, slots_ptr, weights_ptr, token, col, n, y_row_stride, TOP_K, BLOCK)
    if shared_ptr is not None:
        total += tl.load(shared_ptr + token * shared_row_stride + col, mask=col < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_row_stride + col, total.to(out_ptr.dtype.element_ty), mask=col < n)


@triton.jit
def _sum_rows(
    y_ptr, slots_ptr, weights_ptr, token, col, n, y_row_stride, TOP_K: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    total = tl.zeros([COLUMNS], tl.float32)
    for j in tl.static_range(TOP_K):
        slot = tl.load(slots_ptr + token * TOP_K + j)
        weight = tl.load(weights_ptr + token * TOP_K + j)
        # A row nobody wrote may hold NaN: it is masked, not multiplied by zero.
        row = tl.load(y_ptr + slot.to(tl.int64) * y_row_stride + col, mask=(col < n) & (slot >= 0), other=0.0)
        total += weight * row.to(tl.float32)
    return total


def combine_reference(y: Tensor, slots: Tensor, weights: Tensor, *, shared: Tensor | None = None) -> Tensor:
    rows = y.float()[slots.clamp(min=0).long()]
    total = torch.where(slots[..., None] >= 0, rows * weights[..., None], 0.0).sum(1)
    if shared is not None:
        total += shared.float()
    return total.to(y.dtype)
