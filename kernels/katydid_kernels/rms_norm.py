"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * w, alone or with the residual addition that always precedes it.

Both are bound by memory: one read and one write of the row (two of each with the residual). The mean and the product
with w are in fp32 whatever the dtype of x, so the result is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_rms_norm", "add_rms_norm_reference", "rms_norm", "rms_norm_reference"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises the last dimension: ``[..., n]`` with ``weight [n]``, in the dtype of ``x``."""
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns ``(rms_norm(x + residual), x + residual)``, both ``[T, n]`` in the dtype of ``x``.

    The sum is rounded to that dtype before it is normalised, as an unfused model would.
    """
    return add_rms_norm_reference(x, residual, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps), total
