"""Launches of the W4A8 GEMM kernels: TMA descriptors, grids, scratch."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from katydid_kernels.gemm.launch import descriptor, sm_count
from katydid_kernels.gemm.plain import scale_step
from katydid_kernels.w4a8.few_kernel import few_w4a8_kernel
from katydid_kernels.w4a8.grouped_kernel import grouped_w4a8_kernel
from katydid_kernels.w4a8.narrow_kernel import narrow_w4a8_kernel
from katydid_kernels.w4a8.packing import Int4Weight
from katydid_kernels.w4a8.tuning import FewTile, GroupedTile, NarrowTile

__all__ = ["launch_few", "launch_grouped", "launch_narrow", "rows_layout", "weight_descriptors"]


def weight_descriptors(weight: Int4Weight) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of the codes, in boxes of one strip by two groups, and of all scales on one line, in boxes of two groups."""
    lines = weight.codes.shape[-2]
    codes = TensorDescriptor(
        weight.codes, [weight.codes.numel() // (lines * 128), lines, 128], [lines * 128, 128, 1], [1, 64, 128],
        gl.NVMMASharedLayout(128, 8, rank=3),
    )  # fmt: skip
    scales = TensorDescriptor(weight.scales, [weight.scales.numel()], [1], [128], gl.NVMMASharedLayout(0, 16, rank=1))
    return codes, scales


def rows_layout(tokens: int) -> gl.NVMMASharedLayout:
    """Of the token rows of a group in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([tokens, 128], gl.float8e4nv)


@functools.cache
def _narrow_scratch(device: torch.device, tokens: int, warpgroups: int, strips: int) -> tuple[Tensor, Tensor]:
    """Partial sums and counters of the narrow kernel: one set a shape, for one stream at a time."""
    partial = torch.empty(2 * sm_count(device), warpgroups, 64, tokens, device=device)
    return partial, torch.zeros(strips + warpgroups, dtype=torch.int32, device=device)


def launch_narrow(
    x: Tensor,
    weight: Int4Weight,
    x_scale: Tensor,
    out: Tensor,
    tile: NarrowTile,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The kernel for up to `tile.tokens` rows of x."""
    partial, counters = _narrow_scratch(x.device, tile.tokens, tile.warpgroups, len(weight.codes))
    narrow_w4a8_kernel[(sm_count(x.device),)](
        descriptor(x, [tile.tokens, 128]), *weight_descriptors(weight), out, out.stride(0), partial, counters,
        x_scale, scale_step(x_scale), bias, residual, 0 if residual is None else residual.stride(0),
        x.shape[0], weight.rows, weight.cols, STAGES=tile.stages, WGS=tile.warpgroups, PIECES=tile.pieces,
        num_warps=4, maxnreg=128 if tile.warpgroups == 1 else 80, launch_pdl=True,
    )  # fmt: skip
    return out


def launch_few(
    x: Tensor,
    weight: Int4Weight,
    x_scale: Tensor | None,
    out: Tensor,
    tile: FewTile,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The kernel for the fewest rows of x, up to 8: in e4m3 or, without a scale, in bf16."""
    groups = weight.scales.shape[-2]
    words = x.view(torch.int64 if x_scale is None else torch.int32)
    few_w4a8_kernel[(len(weight.codes) * 4,)](
        words, words.stride(0), x_scale, 0 if x_scale is None else scale_step(x_scale),
        weight.codes.view(torch.int32), weight.scales, bias, residual, 0 if residual is None else residual.stride(0),
        out, out.stride(0), x.shape[0], weight.rows, weight.cols,
        WARPS=tile.warps, GROUPS=triton.next_power_of_2(triton.cdiv(groups, tile.warps)),
        ROWS=triton.next_power_of_2(len(x)), QUANTISE=x_scale is None, num_warps=tile.warps, launch_pdl=True,
    )  # fmt: skip
    return out


def launch_grouped(
    x: Tensor,
    weight: Int4Weight,
    out: Tensor,
    tile: GroupedTile,
    tiles: Tensor | None = None,
    tile_count: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    x_scale: Tensor | None = None,
    h_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The grouped kernel: gated, of rows of x through `rows` with `x_scale`, over `h_scale`; or times `h_scale`; or,
    where no `tiles` and `tile_count` of a `RoutePlan` are given, one dense product with x_scale, bias and residual."""
    maxnreg, consumer, producer = tile.registers
    grouped_w4a8_kernel[(sm_count(x.device),)](
        x, x.stride(0), weight.cols, *weight_descriptors(weight), weight.codes.shape[-3], out, out.stride(0),
        rows, tiles, tile_count, x_scale, h_scale, bias, residual, 0 if residual is None else residual.stride(0),
        x.shape[0], weight.rows,
        STAGES=tile.stages, GATED=weight.gated, X_SCALE_STEP=scale_step(x_scale),
        CONSUMER_REGISTERS=consumer, PRODUCER_REGISTERS=producer, X_LAYOUT=rows_layout(tile.tokens),
        num_warps=4, maxnreg=maxnreg, launch_pdl=True,
    )  # fmt: skip
    return out
