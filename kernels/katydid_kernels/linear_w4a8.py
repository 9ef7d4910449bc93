"""y = (x W^T) * x_scale + bias + residual with x in e4m3 and W in packed int4: the projections of a W4A8 model.

Decode reads W once and little else, so half the bytes of fp8 are nearly half the time. int4 values are exact in e4m3
and fp16; every 128 columns are summed by the tensor cores, then scaled by their group's scale and added in fp32. The
fewest rows may come in 16 bits: their kernel quantises them, which saves a launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_kernels.gemm.dense import runs_gluon
from katydid_kernels.linear import linear_reference
from katydid_kernels.quantize_rows import quantize_fp8, quantize_fp8_reference
from katydid_kernels.w4a8.packing import GROUP, Int4Weight, dequantize_int4, unpack_int4
from katydid_kernels.w4a8.plain import plain_w4a8

__all__ = ["linear_w4a8", "linear_w4a8_reference"]

_E4M3 = torch.float8_e4m3fn


def linear_w4a8(
    x: Tensor,
    weight: Int4Weight,
    x_scale: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``[T, in] x [out, in] -> [T, out]`` in bf16.

    Args:
        x: e4m3, rows contiguous; or, without a scale, 16 or 32 bits, quantised as `quantize_fp8` does.
        weight: packed ``[out, in]``, not gated.
        x_scale: fp32 of one element, or ``[T]``.
        bias: ``[out]``.
        residual: ``[T, out]``, added in fp32 before rounding.

    Raises ValueError for shapes, dtypes or scales that do not fit each other.
    """
    _check(x, weight, x_scale, bias, residual)
    if not x.is_cuda or not x.numel():
        return linear_w4a8_reference(x, weight, x_scale, bias=bias, residual=residual)
    gluon = runs_gluon(x.device)
    out = torch.empty(len(x), weight.rows, dtype=torch.bfloat16, device=x.device)
    if gluon:
        # Imported where it runs: the kernels speak to one generation of GPUs and of Triton.
        from katydid_kernels.w4a8.launch import launch_few, launch_grouped, launch_narrow
        from katydid_kernels.w4a8.tuning import few_tile, grouped_tile, narrow_tile

        few = few_tile(x, weight)
        if few is not None:
            return launch_few(x, weight, x_scale, out, few, bias=bias, residual=residual)
    if x_scale is None:
        x, x_scale = quantize_fp8(x)
    x_scale = x_scale.contiguous()
    if gluon and _copied_in_boxes(x):
        tile = narrow_tile(len(x))
        if tile is not None:
            return launch_narrow(x, weight, x_scale, out, tile, bias=bias, residual=residual)
        if x.shape[1] % GROUP == 0:
            return launch_grouped(x, weight, out, grouped_tile(), x_scale=x_scale, bias=bias, residual=residual)
    return plain_w4a8(x, weight, out, x_scale=x_scale, bias=bias, residual=residual)


def _copied_in_boxes(x: Tensor) -> bool:
    """Whether the copy engine takes these rows."""
    return x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0


def _check(x: Tensor, weight: Int4Weight, x_scale: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
    if x.ndim != 2 or x.stride(1) != 1 or not x.is_floating_point() or (x.dtype == _E4M3) != (x_scale is not None):
        raise ValueError(
            "x must be [T, in] with contiguous rows, float8_e4m3fn with a scale or 16 or 32 bits without, "
            f"got {x.dtype} {tuple(x.shape)} {'without' if x_scale is None else 'with'} a scale"
        )
    if weight.codes.ndim != 3 or weight.gated or weight.cols != x.shape[1]:
        raise ValueError(
            f"weight must be one packed [out, {x.shape[1]}] matrix without gate and up, "
            f"got [{weight.rows}, {weight.cols}], codes {tuple(weight.codes.shape)}, gated={weight.gated}"
        )
    tokens, out = x.shape[0], weight.rows
    if x_scale is not None and (x_scale.dtype != torch.float32 or x_scale.numel() not in (1, tokens)):
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
    x_scale: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`linear_w4a8` in torch on dequantised weights: what it computes, and what runs without a GPU."""
    if x_scale is None:
        x, x_scale = quantize_fp8_reference(x)
    total = linear_reference(x.float(), dequantize_int4(*unpack_int4(weight))) * x_scale.reshape(-1, 1)
    if bias is not None:
        total = total + bias.float()
    if residual is not None:
        total = total + residual.float()
    return total.bfloat16()
