"""The product with packed int4 in plain Triton: the oracle of the warp-specialised kernels, and what runs where they
cannot.

One program a tile. Every code is looked up by its own address, which is slow and says again, independently of the
kernels, where `packing` put it. It takes any shape and runs in Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from katydid_kernels.gemm.plain import scale_step
from katydid_kernels.w4a8.packing import GROUP, Int4Weight

__all__ = ["plain_grouped_w4a8", "plain_w4a8"]


def plain_w4a8(
    x: Tensor,
    weight: Int4Weight,
    out: Tensor,
    *,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    block: tuple[int, int] = (64, 64),
) -> Tensor:
    """``out[M, N] = (x[M, K] W^T) * x_scale + bias + residual``; arguments as `linear_w4a8`'s, x of any float type."""
    _launch(x, weight, out, None, None, x_scale, bias, residual, len(x), block)
    return out


def plain_grouped_w4a8(
    x: Tensor,
    weight: Int4Weight,
    out: Tensor,
    tiles: Tensor,
    *,
    rows: Tensor | None = None,
    x_scale: Tensor | None = None,
    block: tuple[int, int],
) -> Tensor:
    """Row r of ``out`` is ``x[rows[r]]`` by the weight of its group, in the order rows are packed in (gated or not).

    Args:
        tiles: int32 ``[max_tiles, 4]`` of `RoutePlan` with tiles of ``block[0]`` rows; unused entries have no rows.
        rows: int32, row r of x itself without it.
        x_scale: fp32 of one element, or one for each row of x.
    """
    _launch(x, weight, out, tiles, rows, x_scale, None, None, len(tiles) * block[0], block)
    return out


def _launch(
    x: Tensor,
    weight: Int4Weight,
    out: Tensor,
    tiles: Tensor | None,
    rows: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    m: int,
    block: tuple[int, int],
) -> None:
    block_m, block_n = block
    _plain_w4a8_kernel[(triton.cdiv(m, block_m), triton.cdiv(weight.rows, block_n))](
        x, weight.codes, weight.scales, out, x_scale, bias, residual, tiles, rows,
        m, weight.rows, weight.cols, *weight.codes.shape[-3:-1], weight.scales.shape[-2],
        x.stride(0), out.stride(0), 0 if residual is None else residual.stride(0), scale_step(x_scale),
        BLOCK_M=block_m, BLOCK_N=block_n, GROUP=GROUP, num_warps=4,
    )  # fmt: skip


@triton.jit
def _code(codes, row, col, lines):
    """The codes at ``(row, col)`` of one packed weight, by the table of `packing`."""
    half = row % 16 // 8
    lane = row % 8 * 4 + col % 16 // 4
    word = row // 64 * (lines * 128) + col // 64 * 2048 + row % 64 // 16 * 512 + lane * 16 + col % 64 // 16 * 4
    nibble = (tl.load(codes + word + col % 4).to(tl.int32) >> (half * 4)) & 15
    return tl.where(nibble < 8, nibble, nibble - 16)


@triton.jit
def _plain_w4a8_kernel(
    x_ptr, codes_ptr, scales_ptr, out_ptr, x_scale_ptr, bias_ptr, residual_ptr, tiles_ptr, rows_ptr,
    m, n, k, strips, lines, groups, x_row_stride, out_row_stride, residual_row_stride, x_scale_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BLOCK_M
    end = m
    codes = codes_ptr
    scales = scales_ptr
    if tiles_ptr is not None:
        tile = tiles_ptr + tl.program_id(0) * 4
        group = tl.load(tile).to(tl.int64)
        codes += group * strips * lines * 128
        scales += group * strips * groups * 64
        start = tl.load(tile + 1)
        end = tl.load(tile + 2)
    row = start + tl.arange(0, BLOCK_M)
    valid = row < end
    source = row
    if rows_ptr is not None:
        source = tl.load(rows_ptr + row, mask=valid, other=0)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the last one are packed too, as zeros, up to a whole strip.
    packed_col = tl.minimum(col, strips * 64 - 1)
    depth = tl.arange(0, GROUP)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in range(groups):
        inside = i * GROUP + depth < k
        x = tl.load(
            x_ptr + source.to(tl.int64)[:, None] * x_row_stride + (i * GROUP + depth)[None, :],
            mask=valid[:, None] & inside[None, :],
            other=0.0,
        )
        # int4 and e4m3 are exact in fp16.
        packed_depth = tl.where(inside, i * GROUP + depth, 0)
        code = _code(codes, packed_col[None, :], packed_depth[:, None], lines).to(tl.float16)
        scale = tl.load(scales + (packed_col // 64 * groups + i) * 64 + packed_col % 64).to(tl.float32)
        acc += tl.dot(x.to(tl.float16), code) * scale[None, :]
    if x_scale_ptr is not None:
        acc *= tl.load(x_scale_ptr + source * x_scale_step, mask=valid, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + col, mask=col < n, other=0.0).to(tl.float32)[None, :]
    written = valid[:, None] & (col < n)[None, :]
    if residual_ptr is not None:
        residual = residual_ptr + row.to(tl.int64)[:, None] * residual_row_stride + col[None, :]
        acc += tl.load(residual, mask=written, other=0.0).to(tl.float32)
    target = out_ptr + row.to(tl.int64)[:, None] * out_row_stride + col[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=written)
