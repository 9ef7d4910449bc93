"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * w, alone or with the residual addition that always precedes it.

Both are bound by memory: one read and one write of the row (two of each with the residual). The mean and the product
with w are in fp32 whatever the dtype of x, so the result is rounded once. A program keeps its row in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_rms_norm", "add_rms_norm_reference", "rms_norm", "rms_norm_reference"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises the last dimension: ``[..., n]`` with ``weight [n]``, in the dtype of ``x``."""
    if not _has_kernel(x):
        return rms_norm_reference(x, weight, eps)
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    _launch(rows, None, weight, None, out, eps)
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns ``(rms_norm(x + residual), x + residual)``, both ``[T, n]`` in the dtype of ``x``.

    The sum is rounded to that dtype before it is normalised, as an unfused model would.
    """
    if not _has_kernel(x):
        return add_rms_norm_reference(x, residual, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, total, out, eps)
    return out, total


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float) -> None:
    rows, n = x.shape
    if rows:
        _rms_norm_kernel[(rows,)](
            x, residual, weight, total, out, n, x.stride(0), 0 if residual is None else residual.stride(0), eps,
            BLOCK=triton.next_power_of_2(n), num_warps=4,
        )  # fmt: skip


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, out_ptr, n, x_row_stride, residual_row_stride, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row_stride + col, mask=col < n, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * residual_row_stride + col, mask=col < n, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * n + col, total, mask=col < n)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=col < n, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / n + eps) * weight
    tl.store(out_ptr + row * n + col, y.to(out_ptr.dtype.element_ty), mask=col < n)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps), total
