"""Launches of the W4A8 kernels for dense weights: TMA descriptors, grids, scratch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from katydid_kernels.gemm.launch import descriptor, sm_count
from katydid_kernels.gemm.plain import scale_step
from katydid_kernels.w4a8.narrow_kernel import narrow_w4a8_kernel
from katydid_kernels.w4a8.packing import Int4Weight
from katydid_kernels.w4a8.tuning import NarrowTile

__all__ = ["launch_narrow", "weight_descriptors"]


def weight_descriptors(weight: Int4Weight) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of the codes, in boxes of one strip by 256 columns, and of all scales on one line, in boxes of two groups."""
    lines = weight.codes.shape[-2]
    codes = TensorDescriptor(
        weight.codes, [weight.codes.numel() // (lines * 128), lines, 128], [lines * 128, 128, 1], [1, 64, 128],
        gl.NVMMASharedLayout(128, 8, rank=3),
    )  # fmt: skip
    scales = TensorDescriptor(weight.scales, [weight.scales.numel()], [1], [128], gl.NVMMASharedLayout(0, 16, rank=1))
    return codes, scales


@functools.cache
def _narrow_scratch(device: torch.device, tokens: int, strips: int) -> tuple[Tensor, Tensor]:
    """Partial sums and counters of the narrow kernel: one set a shape, for one stream at a time."""
    partial = torch.empty(2 * sm_count(device), 64, tokens, device=device)
    return partial, torch.zeros(strips, dtype=torch.int32, device=device)


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
    partial, counters = _narrow_scratch(x.device, tile.tokens, len(weight.codes))
    narrow_w4a8_kernel[(sm_count(x.device),)](
        descriptor(x, [tile.tokens, 128]), *weight_descriptors(weight), out, out.stride(0), partial, counters,
        x_scale, scale_step(x_scale), bias, residual, 0 if residual is None else residual.stride(0),
        x.shape[0], weight.rows, weight.cols, STAGES=tile.stages, num_warps=4, maxnreg=128, launch_pdl=True,
    )  # fmt: skip
    return out
