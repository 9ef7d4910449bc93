"""y = (x W^T) * x_scale * weight_scale + bias + residual in e4m3: the projections of a quantised model.

Fused projections (q, k, v; gate, up) come from checkpoints with a scale each; `segment_scale` spreads them over the
rows of the fused weight, so each keeps its own instead of being quantised again to the largest. Scales may be of blocks
too, as DeepSeek and Qwen3 store them: 128 x 128 of the weight, 128 columns of a token. Products are summed in fp32
every 128 of K: with the tensor cores' own accumulator the error grows with K, to 3e-3 at 12288.
"""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_kernels.gemm.dense import gemm, gemm_reference

__all__ = ["linear_fp8", "linear_fp8_reference", "segment_scale"]


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``[T, in] x [out, in] -> [T, out]`` in ``out_dtype``.

    Args:
        x, weight: e4m3, rows contiguous.
        x_scale: fp32 of one element, or ``[T]``; or, one for 128 columns, ``[T, in / 128]``.
        weight_scale: fp32 of one element, or ``[out]``; or, one for a block, ``[ceil(out / 128), in / 128]``.
        bias: ``[out]``.
        residual: ``[T, out]``, added in fp32 before rounding.

    Raises ValueError for shapes, dtypes or scales that do not fit each other.
    """
    for name, operand in (("x", x), ("weight", weight)):
        if operand.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} must be float8_e4m3fn, got {operand.dtype}")
    return gemm(x, weight, row_scale=x_scale, col_scale=weight_scale, bias=bias, residual=residual, out_dtype=out_dtype)


def segment_scale(scales: Tensor, sizes: list[int]) -> Tensor:
    """Scales of the parts of a fused weight, fp32 ``[parts]``, as one scale for each of its ``sum(sizes)`` rows."""
    if scales.numel() != len(sizes):
        raise ValueError(f"scales must have one element for each of {len(sizes)} parts, got {scales.numel()}")
    return torch.repeat_interleave(scales.float().reshape(-1), torch.tensor(sizes, device=scales.device))


def linear_fp8_reference(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`linear_fp8` in torch and fp32: what it computes, and what runs without a GPU."""
    return gemm_reference(
        x, weight, row_scale=x_scale, col_scale=weight_scale, bias=bias, residual=residual, out_dtype=out_dtype
    )
