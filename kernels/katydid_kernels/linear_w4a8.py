"""y = (x W^T) * x_scale + bias + residual with x in e4m3 and W in packed int4: the projections of a W4A8 model.

Decode reads W once and little else, so half the bytes of fp8 are nearly half the time. int4 values are exact in e4m3;
every 128 columns are summed by the tensor cores, then scaled by their group's scale and added in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_kernels.gemm.dense import runs_gluon
from katydid_kernels.linear import linear_reference
from katydid_kernels.w4a8.packing import GROUP, Int4Weight, dequantize_int4, unpack_int4
from katydid_kernels.w4a8.plain import plain_w4a8

__all__ = ["linear_w4a8", "linear_w4a8_reference"]


def linear_w4a8(
    x: Tensor,
    weight: Int4Weight,
    x_scale: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``[T, in] x [out, in] -> [T, out]`` in bf16.

    Args:
        x: e4m3, rows contiguous.
        weight: packed ``[out, in]``, not gated.
        x_scale: fp32 of one element, or ``[T]``.
        bias: ``[out]``.
        residual: ``[T, out]``, added in fp32 before rounding.

    Raises ValueError for shapes, dtypes or scales that do not fit each other.
    """
    _check(x, weight, x_scale, bias, residual)
    if not x.is_cuda or not x.numel():
        return linear_w4a8_reference(x, weight, x_scale, bias=bias, residual=residual)
    x_scale = x_scale.contiguous()
    out = torch.empty(len(x), weight.rows, dtype=torch.bfloat16, device=x.device)
    if runs_gluon(x.device) and x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0:
        # Imported where it runs: the kernels speak to one generation of GPUs and of Triton.
        from katydid_kernels.w4a8.launch import launch_grouped, launch_narrow
        from katydid_kernels.w4a8.tuning import grouped_tile, narrow_tile

        tile = narrow_tile(len(x))
        if tile is not None:
            return launch_narrow(x, weight, x_scale, out, tile, bias=bias, residual=residual)
        if x.shape[1] % GROUP == 0:
            return launch_grouped(x, weight, out, grouped_tile(), x_scale=x_scale, bias=bias, residual=residual)
    return plain_w4a8(x, weight, out, x_scale=x_scale, bias=bias, residual=residual)


def _check(x: Tensor, weight: Int4Weight, x_scale: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    if x.ndim != 2 or x.dtype != torch.float8_e4m3fn or x.stride(1) != 1:
        raise ValueError(f"x must be float8_e4m3fn [T, in] with contiguous rows, got {x.dtype} {tuple(x.shape)}")
    if weight.codes.ndim != 3 or weight.gated or weight.cols != x.shape[1]:
        raise ValueError(
            f"weight must be one packed [out, {x.shape[1]}] matrix without gate and up, "
            f"got [{weight.rows}, {weight.cols}], codes {tuple(weight.codes.shape)}, gated={weight.gated}"
        )
    tokens, out = x.shape[0], weight.rows
    if x_scale.dtype != torch.float32 or x_scale.numel() not in (1, tokens):
        raise ValueError(
            f"x_scale must be fp32 with 1 or {tokens} elements, got {x_scale.dtype} {tuple(x_scale.shape)}"
        )
    if bias is not None and bias.shape != (out,):
        raise ValueError(f"bias must be [{out}], got {list(bias.shape)}")
    if residual is not None and residual.shape != (tokens, out):
        raise ValueError(f"residual must be [{tokens}, {out}], got {list(residual.shape)}")


def linear_w4a8_reference(
    x: Tensor,
    weight: Int4Weight,
    x_scale: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`linear_w4a8` in torch on dequantised weights: what it computes, and what runs without a GPU."""
    total = linear_reference(x.float(), dequantize_int4(*unpack_int4(weight))) * x_scale.reshape(-1, 1)
    if bias is not None:
        total = total + bias.float()
    if residual is not None:
        total = total + residual.float()
    return total.bfloat16()
