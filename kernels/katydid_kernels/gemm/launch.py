"""Launches of the Gluon GEMM kernels: TMA descriptors, grids, scratch."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from katydid_kernels.gemm.narrow_kernel import narrow_gemm_kernel
from katydid_kernels.gemm.plain import scale_step
from katydid_kernels.gemm.tuning import NarrowTile, WideTile
from katydid_kernels.gemm.wide_kernel import wide_gemm_kernel

__all__ = ["GLUON_TYPE", "REGISTERS", "box_layout", "descriptor", "launch_narrow", "launch_wide", "sm_count"]

# Registers a thread at launch, by consumer warpgroups: 64 K over them and the producer's warpgroup.
REGISTERS = {1: 255, 2: 168, 3: 128}
GLUON_TYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


@functools.cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def box_layout(rows: int, cols: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How such a box of a matrix lies in shared memory, swizzled for wgmma; kept, because making one takes a while."""
    return gl.NVMMASharedLayout.get_default_for([rows, cols], GLUON_TYPE[dtype])


def descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """A TMA descriptor over a matrix whose boxes land in shared memory swizzled for wgmma."""
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), box, box_layout(box[0], box[1], tensor.dtype)
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
    must be finite. Scales of blocks are ``[M, K / 128]`` and ``[ceil(N / 128), K / 128]``, grouped ``[E, N / 128,
    K / 128]``, for e4m3.
    """
    n, k = b.shape[-2:]
    block_k = 128 // a.element_size()
    b = b.view(-1, k)
    ctas = sm_count(a.device)
    blocks = row_scale is not None and row_scale.ndim == 2
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
        ROW_VECTOR=row_scale is not None and row_scale.numel() > 1 and not blocks,
        COL_VECTOR=tiles is None and col_scale is not None and col_scale.numel() > 1 and not blocks,
        BLOCKS=blocks,
        num_warps=4,
        maxnreg=REGISTERS[tile.warpgroups],
        launch_pdl=tiles is not None,
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
        AT_ONCE=2 if promote and k % (2 * block_k) == 0 else 1,
        num_warps=4,
        maxnreg=128,
        launch_pdl=True,
    )
    return out
