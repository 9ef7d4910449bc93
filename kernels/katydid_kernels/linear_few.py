"""y = (x W^T) * x_scale * weight_scale + bias with W in e4m3, for one or two rows: no tensor core, no meeting of CTAs.

A decode step of one row reads its weights once, and then what counts is the way from one kernel to the next. Here a
program holds 16 KB of weights, whole rows of W: it has them in registers before the kernel ahead has ended (PDL), waits
for x, multiplies in fp32 and writes its columns of y. x may come in 16 bits: each program then quantises it for itself,
as `quantize_fp8` does, which takes less than another launch. Bound by memory: W is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from katydid_kernels.gemm.dense import gemm_reference, runs_gluon
from katydid_kernels.gemm.plain import scale_step
from katydid_kernels.quantize_rows import quantize_fp8_reference

__all__ = ["FEW_ROWS", "linear_few", "linear_few_reference", "takes_few"]

FEW_ROWS = 2
_TILE = 16384
_MOST_COLUMNS = 8192


def takes_few(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear_few` is the faster one for these rows."""
    rows, columns = x.shape
    return 0 < rows <= FEW_ROWS and columns <= _MOST_COLUMNS and weight.stride(1) == 1 and runs_gluon(x.device)


def linear_few(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    overlap: bool = True,
) -> Tensor:
    """``[T, in] x [out, in] -> [T, out]`` in ``out_dtype``, T small.

    Args:
        x: e4m3, or 16 or 32 bits: quantised here, with ``x_scale`` or, without, with one scale a token.
        weight: e4m3, rows contiguous.
        weight_scale: fp32 of one element, or ``[out]``.
        x_scale: fp32 of one element, or ``[T]`` for x in e4m3.
        bias: ``[out]``.
        overlap: let the kernel start before the preceding one ends; the weights must be older than that.

    Raises ValueError for x in e4m3 without its scale.
    """
    plain = x.dtype != torch.float8_e4m3fn
    if not plain and x_scale is None:
        raise ValueError("x_scale must be given for x in float8_e4m3fn")
    if not _has_kernel(x):
        return linear_few_reference(x, weight, weight_scale, x_scale=x_scale, bias=bias, out_dtype=out_dtype)
    rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty(rows, n, dtype=out_dtype, device=x.device)
    block_k = triton.next_power_of_2(k)
    block_n = max(1, _TILE // block_k)
    _linear_few_kernel[(triton.cdiv(n, block_n),)](
        x, x.stride(0), x_scale, 0 if x_scale is None else scale_step(x_scale), weight, weight.stride(0), weight_scale,
        scale_step(weight_scale), bias, out, n, k,
        ROWS=rows, BLOCK_N=block_n, BLOCK_K=block_k, QUANTISE=plain, EARLY=overlap, num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return out


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda


@triton.jit(do_not_specialize=["x_scale_step", "weight_scale_step", "n"])
def _linear_few_kernel(
    x_ptr, x_stride, x_scale_ptr, x_scale_step, weight_ptr, weight_stride, weight_scale_ptr, weight_scale_step,
    bias_ptr, out_ptr, n, k,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, QUANTISE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_K)
    there = row < n
    source = weight_ptr + row.to(tl.int64)[:, None] * weight_stride + col[None, :]
    weight = tl.load(source, mask=there[:, None] & (col < k)[None, :], other=0.0)
    factor = tl.load(weight_scale_ptr + row * weight_scale_step, mask=there, other=0.0)
    offset = tl.zeros([BLOCK_N], tl.float32)
    if bias_ptr is not None:
        offset = tl.load(bias_ptr + row, mask=there, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    for r in tl.static_range(ROWS):
        x = tl.load(x_ptr + r * x_stride + col, mask=col < k, other=0.0).to(tl.float32)
        if x_scale_ptr is not None:
            scale = tl.load(x_scale_ptr + r * x_scale_step)
        else:
            scale = tl.maximum(tl.max(tl.abs(x), 0) / 448.0, 1e-12)
        if QUANTISE:
            x = tl.minimum(tl.maximum(x * (1.0 / scale), -448.0), 448.0).to(weight_ptr.dtype.element_ty).to(tl.float32)
        # Scaled before the sum, so that the scale is asked for beside x and not behind it.
        y = tl.sum(weight.to(tl.float32) * (x * scale)[None, :], 1) * factor + offset
        tl.store(out_ptr + r * n + row, y.to(out_ptr.dtype.element_ty), mask=there)


def linear_few_reference(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`linear_few` in torch and fp32: what it computes, and what runs without a GPU."""
    if x.dtype != torch.float8_e4m3fn:
        x, x_scale = quantize_fp8_reference(x, scale=x_scale)
    return gemm_reference(x, weight, row_scale=x_scale, col_scale=weight_scale, bias=bias, out_dtype=out_dtype)
