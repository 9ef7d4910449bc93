"""The GEMM in plain Triton: the oracle of the warp-specialised kernels, and what runs where they cannot.

One program a tile, loads and products software-pipelined by the compiler. It takes any shape, any row stride, fp32 and
fp16 too, and runs in Triton's interpreter; on an H200 it reaches about 80 % of the Gluon kernels' rate.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["plain_gemm", "plain_grouped_gemm"]


def plain_gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    promote: bool = False,
    block: tuple[int, int, int] = (128, 128, 64),
) -> Tensor:
    """``out[M, N] = (a[M, K] @ b[N, K]^T) * row_scale * col_scale + bias + residual``; arguments as `gemm`'s.

    block: rows, columns and K of a tile; K divides 128.
    """
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    block_m, block_n, block_k = block
    row_step, col_step = scale_step(row_scale), scale_step(col_scale)
    blocks = row_scale is not None and row_scale.ndim == 2
    _plain_gemm_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
        a, b, out, row_scale, col_scale, bias, residual, None, None,
        m, n, k, a.stride(0), b.stride(0), 0, out.stride(0), 0 if residual is None else residual.stride(0),
        row_step, col_step, BLOCKS=blocks,
        PROMOTE=promote, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=8, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def plain_grouped_gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    tiles: Tensor,
    *,
    rows: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    promote: bool = False,
    block: tuple[int, int, int],
) -> Tensor:
    """Row r of ``out[R, N]`` is ``a[rows[r]] @ b[group of r]^T`` scaled.

    Args:
        a: ``[*, K]``; row ``rows[r]`` is read for output row r, row r itself without `rows`.
        b: ``[groups, N, K]``.
        tiles: int32 ``[max_tiles, 4]`` of `RoutePlan` with tiles of ``block[0]`` rows; unused entries have no rows.
        rows: int32 ``[R]``.
        row_scale: fp32 scalar, or ``[R]``; or of blocks, ``[R, K / 128]``.
        col_scale: fp32 scalar, or ``[groups]``; or of blocks, ``[groups, ceil(N / 128), K / 128]``.
    """
    _, n, k = b.shape
    block_m, block_n, block_k = block
    _plain_gemm_kernel[(len(tiles) * triton.cdiv(n, block_n),)](
        a, b, out, row_scale, col_scale, None, None, tiles, rows,
        len(tiles) * block_m, n, k, a.stride(0), b.stride(1), b.stride(0), out.stride(0), 0,
        scale_step(row_scale), scale_step(col_scale), BLOCKS=row_scale is not None and row_scale.ndim == 2,
        PROMOTE=promote, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=1, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def scale_step(scale: Tensor | None) -> int:
    """Stride of a scale that is one number or one per row: 0 or 1."""
    return int(scale is not None and scale.numel() > 1)


@triton.jit
def _plain_gemm_kernel(
    a_ptr, b_ptr, out_ptr, row_scale_ptr, col_scale_ptr, bias_ptr, residual_ptr, tiles_ptr, rows_ptr,
    m, n, k, a_row_stride, b_row_stride, b_group_stride, out_row_stride, residual_row_stride,
    row_scale_step, col_scale_step, BLOCKS: tl.constexpr,
    PROMOTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    band = GROUP_M * tiles_n
    first = (tl.program_id(0) // band) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    tile_m = first + (tl.program_id(0) % band) % height
    tile_n = (tl.program_id(0) % band) // height

    b = b_ptr
    start = tile_m * BLOCK_M
    end = m
    if tiles_ptr is not None:
        group = tl.load(tiles_ptr + tile_m * 4).to(tl.int64)
        b += group * b_group_stride
        start = tl.load(tiles_ptr + tile_m * 4 + 1)
        end = tl.load(tiles_ptr + tile_m * 4 + 2)
    row = start + tl.arange(0, BLOCK_M)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    row_valid = row < end
    col_valid = col < n
    source = row
    if rows_ptr is not None:
        source = tl.load(rows_ptr + row, mask=row_valid, other=0)
    a = a_ptr + source.to(tl.int64)[:, None] * a_row_stride + depth[None, :]
    b += col.to(tl.int64)[None, :] * b_row_stride + depth[:, None]
    if BLOCKS:
        row_scale_ptr += row.to(tl.int64) * (k // 128)
        block_row = col // 128
        if tiles_ptr is not None:
            block_row += group * tl.cdiv(n, 128)
        col_scale_ptr += block_row * (k // 128)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for offset in range(0, k, BLOCK_K):
        depth_valid = depth < k - offset
        a_tile = tl.load(a, mask=row_valid[:, None] & depth_valid[None, :], other=0.0)
        b_tile = tl.load(b, mask=depth_valid[:, None] & col_valid[None, :], other=0.0)
        if BLOCKS:
            part = tl.dot(a_tile, b_tile, input_precision="ieee")
            part *= tl.load(row_scale_ptr + offset // 128, mask=row_valid, other=0.0)[:, None]
            acc += part * tl.load(col_scale_ptr + offset // 128, mask=col_valid, other=0.0)[None, :]
        elif PROMOTE:
            acc += tl.dot(a_tile, b_tile, input_precision="ieee")
        else:
            acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
        a += BLOCK_K
        b += BLOCK_K

    if row_scale_ptr is not None and not BLOCKS:
        acc *= tl.load(row_scale_ptr + row * row_scale_step, mask=row_valid, other=0.0)[:, None]
    if col_scale_ptr is not None and not BLOCKS:
        if tiles_ptr is not None:
            acc *= tl.load(col_scale_ptr + group * col_scale_step)
        else:
            acc *= tl.load(col_scale_ptr + col * col_scale_step, mask=col_valid, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + col, mask=col_valid, other=0.0).to(tl.float32)[None, :]
    inside = row_valid[:, None] & col_valid[None, :]
    row = row.to(tl.int64)
    if residual_ptr is not None:
        residual = residual_ptr + row[:, None] * residual_row_stride + col[None, :]
        acc += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row[:, None] * out_row_stride + col[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
