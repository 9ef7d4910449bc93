"""`gemm`: D = A B^T with its scales, bias and residual, on the kernel that suits the device and the shape."""

from __future__ import annotations

import functools
from typing import TypedDict

import torch
from torch import Tensor

from katydid_kernels.gemm.plain import plain_gemm
from katydid_kernels.gemm.tuning import narrow_tile, wide_tile
from katydid_kernels.linear import linear_reference

__all__ = ["BLOCK", "gemm", "gemm_reference", "runs_gluon"]

# Elements of K, and rows of weights, that share a scale where scales are of blocks.
BLOCK = 128


class _Hooks(TypedDict):
    row_scale: Tensor | None
    col_scale: Tensor | None
    bias: Tensor | None
    residual: Tensor | None


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    promote: bool = True,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``(a @ b^T) * row_scale * col_scale + bias + residual`` as ``[M, N]``, scaled and added in fp32, rounded once.

    Args:
        a: ``[M, K]`` bf16, fp16 or e4m3, rows contiguous.
        b: ``[N, K]`` of the same dtype.
        row_scale: fp32 of one element, or ``[M]``; or, with K a multiple of 128, ``[M, K / 128]``: one for every 128
            of K in a row.
        col_scale: fp32 of one element, or ``[N]``; segments with a scale each are a vector with repeats. With
            `row_scale` of blocks ``[ceil(N / 128), K / 128]``: one for every block of 128 x 128.
        bias: ``[N]``.
        residual: ``[M, N]``, may be `out`.
        promote: for e4m3, leave the tensor cores' short accumulator every 128 of K; slower by some 10 %.
        out: where to write, in place of a new tensor of `out_dtype`.

    Raises ValueError for shapes, dtypes or scales that do not fit each other.
    """
    _check(a, b, row_scale, col_scale, bias, residual)
    if out is None:
        out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    hooks = _Hooks(row_scale=row_scale, col_scale=col_scale, bias=bias, residual=residual)
    promote = promote and a.dtype == torch.float8_e4m3fn
    if out.numel() == 0:
        return out
    if not a.is_cuda:
        return out.copy_(gemm_reference(a, b, **hooks, out_dtype=out.dtype))
    if runs_gluon(a.device) and _fits_copy_engine(a, b, out):
        # Imported where it runs: the kernels speak to one generation of GPUs and of Triton.
        from katydid_kernels.gemm.launch import launch_narrow, launch_wide

        blocks = row_scale is not None and row_scale.ndim == 2
        narrow = None if blocks else narrow_tile(a.shape[0])
        if narrow is not None:
            return launch_narrow(a, b, out, narrow, **hooks, promote=promote)
        return launch_wide(a, b, out, wide_tile(*out.shape, promote=promote, blocks=blocks), **hooks, promote=promote)
    return plain_gemm(a, b, out, **hooks, promote=promote)


def _check(
    a: Tensor,
    b: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or a.dtype != b.dtype:
        raise ValueError(f"a [M, K] and b [N, K] must share K and dtype, got {a.shape} {a.dtype}, {b.shape} {b.dtype}")
    if a.stride(1) != 1 or b.stride(1) != 1:
        raise ValueError(f"rows of a and b must be contiguous, got strides {a.stride()} and {b.stride()}")
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    if row_scale is not None and col_scale is not None and 2 in (row_scale.ndim, col_scale.ndim):
        _check_blocks((m, n, k), a.dtype, row_scale, col_scale)
        row_scale = col_scale = None
    for name, scale, size in (("row_scale", row_scale, m), ("col_scale", col_scale, n)):
        if scale is not None and (scale.dtype != torch.float32 or scale.numel() not in (1, size)):
            raise ValueError(f"{name} must be fp32 with 1 or {size} elements, got {scale.dtype} {tuple(scale.shape)}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias must be [{n}], got {list(bias.shape)}")
    if residual is not None and residual.shape != (m, n):
        raise ValueError(f"residual must be [{m}, {n}], got {list(residual.shape)}")


def _check_blocks(shape: tuple[int, int, int], dtype: torch.dtype, row_scale: Tensor, col_scale: Tensor) -> None:
    m, n, k = shape
    if k % BLOCK or dtype != torch.float8_e4m3fn:
        raise ValueError(f"scales of blocks need e4m3 and K a multiple of {BLOCK}, got {dtype} and K = {k}")
    for name, scale, size in (("row_scale", row_scale, m), ("col_scale", col_scale, -(-n // BLOCK))):
        if scale.dtype != torch.float32 or scale.shape != (size, k // BLOCK) or not scale.is_contiguous():
            raise ValueError(
                f"{name} must be fp32 [{size}, {k // BLOCK}], contiguous, got {scale.dtype} {list(scale.shape)}"
            )


@functools.cache
def runs_gluon(device: torch.device) -> bool:
    """Whether the warp-specialised kernels run there: Hopper only, they are made of its instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _fits_copy_engine(*tensors: Tensor) -> bool:
    """TMA wants a base and row strides of 16 bytes."""
    return all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in tensors)


def gemm_reference(
    a: Tensor,
    b: Tensor,
    *,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`gemm` in torch and fp32: what it computes, and what runs without a GPU."""
    # A row's bits must not depend on the rows beside it: see `linear`.
    wide_a, wide_b = a.float(), b.float()
    if row_scale is not None and col_scale is not None and row_scale.ndim == 2:
        wide_a = wide_a * row_scale.repeat_interleave(BLOCK, 1)
        wide_b = wide_b * col_scale.repeat_interleave(BLOCK, 0)[: len(b)].repeat_interleave(BLOCK, 1)
        row_scale = col_scale = None
    total = linear_reference(wide_a, wide_b)
    if row_scale is not None:
        total *= row_scale.reshape(-1, 1)
    if col_scale is not None:
        total *= col_scale.reshape(1, -1)
    if bias is not None:
        total += bias.float()
    if residual is not None:
        total += residual.float()
    return total.to(out_dtype)
