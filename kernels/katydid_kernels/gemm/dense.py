"""`gemm`: D = A B^T with its scales, bias and residual, on the kernel that suits the device and the shape."""

from __future__ import annotations

import functools
from typing import TypedDict

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from katydid_kernels.gemm.narrow_kernel import narrow_gemm_kernel
from katydid_kernels.gemm.plain import plain_gemm, scale_step
from katydid_kernels.gemm.tuning import NarrowTile, WideTile, narrow_tile, wide_tile
from katydid_kernels.gemm.wide_kernel import wide_gemm_kernel

__all__ = [
    "GLUON_TYPE",
    "REGISTERS",
    "gemm",
    "gemm_reference",
    "launch_narrow",
    "launch_wide",
    "runs_gluon",
    "sm_count",
]

# Registers a thread at launch, by consumer warpgroups: 64 K over them and the producer's warpgroup.
REGISTERS = {1: 255, 2: 168, 3: 128}
GLUON_TYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


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
        row_scale: fp32 of one element, or ``[M]``.
        col_scale: fp32 of one element, or ``[N]``; segments with a scale each are a vector with repeats.
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
        narrow = narrow_tile(a.shape[0])
        if narrow is not None:
            return launch_narrow(a, b, out, narrow, **hooks, promote=promote)
        return launch_wide(a, b, out, wide_tile(*out.shape, promote=promote), **hooks, promote=promote)
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
    m, n = a.shape[0], b.shape[0]
    for name, scale, size in (("row_scale", row_scale, m), ("col_scale", col_scale, n)):
        if scale is not None and (scale.dtype != torch.float32 or scale.numel() not in (1, size)):
            raise ValueError(f"{name} must be fp32 with 1 or {size} elements, got {scale.dtype} {tuple(scale.shape)}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias must be [{n}], got {list(bias.shape)}")
    if residual is not None and residual.shape != (m, n):
        raise ValueError(f"residual must be [{m}, {n}], got {list(residual.shape)}")


@functools.cache
def runs_gluon(device: torch.device) -> bool:
    """Whether the warp-specialised kernels run there: Hopper only, they are made of its instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _fits_copy_engine(*tensors: Tensor) -> bool:
    """TMA wants a base and row strides of 16 bytes."""
    return all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in tensors)


def descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """A TMA descriptor over a matrix whose boxes land in shared memory swizzled for wgmma."""
    return TensorDescriptor(
        tensor,
        list(tensor.shape),
        list(tensor.stride()),
        box,
        gl.NVMMASharedLayout.get_default_for(box, GLUON_TYPE[tensor.dtype]),
    )


def launch_wide(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    tile: WideTile,
    *,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    promote: bool = False,
    tiles: Tensor | None = None,
    tile_count: Tensor | None = None,
) -> Tensor:
    """The wide kernel itself, grouped where `tiles` and `tile_count` of a `RoutePlan` are given.

    Grouped, b is ``[E, N, K]``, N a multiple of the tile's columns, and col_scale ``[E]``. Columns of `a` past K
    must be finite.
    """
    n, k = b.shape[-2:]
    block_k = 128 // a.element_size()
    b = b.view(-1, k)
    ctas = sm_count(a.device)
    if tiles is None:
        ctas = min(ctas, triton.cdiv(a.shape[0], tile.tile_m) * triton.cdiv(n, tile.block_n))
    wide_gemm_kernel[(ctas,)](
        descriptor(a, [tile.block_m, block_k]),
        descriptor(b, [tile.block_n, block_k]),
        descriptor(out, [tile.block_m, tile.piece]),
        None if tiles is None else out,
        out.stride(0),
        tiles,
        tile_count,
        row_scale,
        col_scale,
        bias,
        residual,
        0 if residual is None else residual.stride(0),
        a.shape[0],
        n,
        k,
        BAND=tile.band,
        STAGES=tile.stages,
        WGS=tile.warpgroups,
        STAGED=tile.staged,
        PROMOTE=promote,
        ROW_VECTOR=row_scale is not None and row_scale.numel() > 1,
        COL_VECTOR=tiles is None and col_scale is not None and col_scale.numel() > 1,
        num_warps=4,
        maxnreg=REGISTERS[tile.warpgroups],
    )
    return out


@functools.cache
def _narrow_scratch(device: torch.device, warpgroups: int, tokens: int, tiles: int) -> tuple[Tensor, Tensor]:
    """Partial sums and counters of the narrow kernel: one set a shape, for one stream at a time."""
    partial = torch.empty(2 * sm_count(device) * warpgroups, 64, tokens, device=device)
    return partial, torch.zeros(tiles * warpgroups, dtype=torch.int32, device=device)


def launch_narrow(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    tile: NarrowTile,
    *,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    promote: bool = False,
) -> Tensor:
    """The kernel for up to `tile.tokens` rows of a."""
    m, k = a.shape
    n = b.shape[0]
    block_k = 128 // a.element_size()
    partial, counters = _narrow_scratch(a.device, tile.warpgroups, tile.tokens, triton.cdiv(n, 64 * tile.warpgroups))
    narrow_gemm_kernel[(sm_count(a.device),)](
        descriptor(a, [tile.tokens, block_k]),
        descriptor(b, [64, block_k]),
        out,
        out.stride(0),
        partial,
        counters,
        row_scale,
        scale_step(row_scale),
        col_scale,
        scale_step(col_scale),
        bias,
        residual,
        0 if residual is None else residual.stride(0),
        m,
        n,
        k,
        STAGES=tile.stages,
        WGS=tile.warpgroups,
        PROMOTE=promote,
        num_warps=4,
        maxnreg=128 if tile.warpgroups == 1 else 112,
    )
    return out


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
    total = a.float() @ b.float().T
    if row_scale is not None:
        total *= row_scale.reshape(-1, 1)
    if col_scale is not None:
        total *= col_scale.reshape(1, -1)
    if bias is not None:
        total += bias.float()
    if residual is not None:
        total += residual.float()
    return total.to(out_dtype)
