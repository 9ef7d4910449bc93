"""Routed experts on the Gluon kernels: plan, gate-up with SwiGLU, down, weighted sum, in buffers made once.

The fewest tokens go through one persistent launch without a plan (`experts_few_kernel`), few tokens an expert through
one after the plan (`experts_decode_kernel`), many through the grouped GEMMs: gate-up with the weights as wgmma's rows,
down by the wide kernel, then `combine`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from katydid_kernels.gemm.combine import combine
from katydid_kernels.gemm.dense import BLOCK
from katydid_kernels.gemm.expert_scales import ExpertScales
from katydid_kernels.gemm.experts_decode_kernel import experts_decode_kernel
from katydid_kernels.gemm.experts_few_kernel import experts_few_kernel
from katydid_kernels.gemm.experts_up_kernel import experts_up_kernel
from katydid_kernels.gemm.launch import GLUON_TYPE, REGISTERS, box_layout, descriptor, launch_wide, sm_count
from katydid_kernels.gemm.plan import RoutePlan, plan_routes
from katydid_kernels.gemm.tuning import (
    BLOCK_DOWN_TILE,
    BLOCK_UP_TILE,
    DecodeTile,
    FewTile,
    UpTile,
    WideTile,
    decode_tile,
    down_tile,
    few_tokens_tile,
    summed_at_once,
    up_tile,
)
from katydid_kernels.quantize_rows import quantize_fp8

__all__ = ["ExpertWorkspace", "run_experts"]

_K_BYTES = 128
# Bytes of a row of w2 that is read in pairs.
PAIRED_ROW = 192
# Up to here the sum is part of the decode kernel; for more tokens a launch of its own has more loads in flight.
SUMMED_TOKENS = 64


@dataclass(frozen=True)
class ExpertWorkspace:
    """Scratch made once: nothing is allocated while a batch runs, so its launches can be captured. For one stream."""

    plan: RoutePlan
    h: Tensor
    h_unquantised: Tensor | None
    h_scales: Tensor | None
    parts: Tensor | None
    y: Tensor
    ready: Tensor
    sync: Tensor

    @staticmethod
    def allocate(
        tokens: int,
        top_k: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        of_blocks: bool = False,
    ) -> ExpertWorkspace:
        """Scratch for batches of up to `tokens` rows through experts of this dtype, ``w2[E, H, I]`` of this shape, with
        scales of blocks or not."""
        experts, hidden, intermediate = shape
        pairs = tokens * top_k
        plan = RoutePlan.allocate(tokens, top_k, experts, device)
        padded_bytes = -(-intermediate * dtype.itemsize // _K_BYTES) * _K_BYTES
        return ExpertWorkspace(
            plan,
            # Zeros, because what pads a row up to a whole stage is multiplied (by zeros, but NaN would stay NaN).
            torch.zeros(pairs, padded_bytes, dtype=torch.uint8, device=device).view(dtype),
            torch.zeros(pairs, intermediate, dtype=torch.bfloat16, device=device) if of_blocks else None,
            torch.zeros(pairs, intermediate // BLOCK, device=device) if of_blocks else None,
            torch.zeros(len(plan.tiles) * (intermediate // BLOCK), dtype=torch.int32, device=device)
            if of_blocks
            else None,
            torch.empty(pairs, hidden, dtype=torch.bfloat16, device=device),
            torch.zeros(max(len(plan.tiles), tokens), dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )


def choose_tile(
    pairs: int, experts: int, intermediate: int, hidden: int, dtype: torch.dtype, *, of_blocks: bool = False
) -> FewTile | DecodeTile | UpTile:
    """The tuned tile: decode's as long as an expert sees few rows."""
    few = None if of_blocks else few_tokens_tile(pairs, experts, intermediate, dtype)
    many = BLOCK_UP_TILE if of_blocks else up_tile(pairs / experts, intermediate, hidden, dtype)
    return few or decode_tile(pairs, experts, intermediate, dtype, of_blocks=of_blocks) or many


def run_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    out: Tensor,
    scales: ExpertScales,
    workspace: ExpertWorkspace,
    *,
    first_expert: int = 0,
    shared: Tensor | None = None,
    tile: FewTile | DecodeTile | UpTile | None = None,
    down: WideTile | None = None,
    placed: bool = False,
) -> Tensor:
    """``out[t] = sum over j of weights[t, j] * w2[e] swiglu(w13[e] x[t]) + shared[t]``; arguments as `fused_moe`'s.
    placed: the workspace's plan is filled already, for the tuned tile."""
    tile = tile or choose_tile(ids.numel(), len(w2), w2.shape[2], w2.shape[1], w2.dtype, of_blocks=scales.of_blocks)
    if scales.of_blocks and workspace.parts is None:
        raise ValueError("workspace must be allocated with of_blocks for scales of blocks")
    if scales.of_blocks and isinstance(tile, UpTile):
        return _run_blocks(x, w13, w2, weights, ids, out, scales, workspace, first_expert, shared)
    if isinstance(tile, FewTile):
        _launch_few(x, w13, w2, weights, ids, first_expert, shared, out, scales, workspace, tile)
        return out
    plan = workspace.plan
    if not placed:
        plan_routes(ids, plan, len(w2), tile.tokens, first_expert=first_expert)
    if isinstance(tile, DecodeTile):
        summed = len(ids) <= SUMMED_TOKENS
        paired = w2.shape[2] * w2.element_size() == PAIRED_ROW and not scales.of_blocks
        _launch_decode(x, w13, w2, weights, ids, shared, out, scales, workspace, tile, summed=summed, paired=paired)
        if not summed:
            combine(workspace.y, plan.slots[: len(ids)], weights, out, shared=shared, early=True, paired=paired)
    else:
        _launch_up(x, w13, scales, workspace, tile)
        launch_wide(
            workspace.h, w2, workspace.y, down or down_tile(w2.shape[1], tile.tokens), col_scale=scales.down,
            tiles=plan.tiles, tile_count=plan.tile_count,
        )  # fmt: skip
        combine(workspace.y, plan.slots[: len(ids)], weights, out, shared=shared, early=True)
    return out


def _run_blocks(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    out: Tensor,
    scales: ExpertScales,
    workspace: ExpertWorkspace,
    first_expert: int,
    shared: Tensor | None,
) -> Tensor:
    """The grouped GEMMs with scales of blocks; h is quantised between them."""
    h, h_scales = workspace.h_unquantised, workspace.h_scales
    assert h is not None
    assert h_scales is not None
    plan = plan_routes(ids, workspace.plan, len(w2), BLOCK_UP_TILE.tokens, first_expert=first_expert)
    _launch_up(x, w13, scales, workspace, BLOCK_UP_TILE)
    rows = ids.numel()
    quantize_fp8(h[:rows], group=BLOCK, out=(workspace.h[:rows], h_scales[:rows]))
    launch_wide(
        workspace.h, w2, workspace.y, BLOCK_DOWN_TILE, row_scale=h_scales, col_scale=scales.down, promote=True,
        tiles=plan.tiles, tile_count=plan.tile_count,
    )  # fmt: skip
    return combine(workspace.y, plan.slots[: len(ids)], weights, out, shared=shared, early=True)


def _weight_descriptor(view: Tensor, box: list[int]) -> TensorDescriptor:
    """A descriptor over weights seen with their rows in eights, which is how the swizzle repeats."""
    return TensorDescriptor(view, list(view.shape), list(view.stride()), box, _eights_layout(view.ndim, view.dtype))


@functools.cache
def _eights_layout(rank: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(128, GLUON_TYPE[dtype].primitive_bitwidth, rank=rank)


def _interleaved(w13: Tensor, rows: int) -> TensorDescriptor:
    experts, double, hidden = w13.shape
    view = w13.view(experts, 2, double // 16, 8, hidden).transpose(1, 2)
    return _weight_descriptor(view, [1, rows // 16, 2, 8, _K_BYTES // w13.element_size()])


def _rows_layout(tokens: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return box_layout(tokens, _K_BYTES // dtype.itemsize, dtype)


def _launch_up(x: Tensor, w13: Tensor, scales: ExpertScales, workspace: ExpertWorkspace, tile: UpTile) -> None:
    plan = workspace.plan
    h = workspace.h if workspace.h_unquantised is None else workspace.h_unquantised
    experts_up_kernel[(sm_count(x.device),)](
        x, x.stride(0), _interleaved(w13, tile.rows), h, plan.rows, plan.tiles, plan.tile_count,
        scales.up, scales.inverse_h, scales.token,
        H=w13.shape[2], WIDTH=w13.shape[1] // 2, H_STRIDE=h.stride(0),
        TOKENS=tile.tokens - tile.extra, EXTRA=tile.extra, STAGES=tile.stages, WGS=tile.warpgroups,
        PROMOTE=tile.promote, BLOCKS=scales.of_blocks,
        CONSUMER_REGISTERS=tile.consumer_registers, PRODUCER_REGISTERS=tile.producer_registers,
        X_LAYOUT=_rows_layout(128, x.dtype), num_warps=4, maxnreg=REGISTERS[tile.warpgroups], launch_pdl=True,
    )  # fmt: skip


def _down_weights(w2: Tensor, rows: int, *, paired: bool = False) -> TensorDescriptor:
    experts, hidden, intermediate = w2.shape
    if paired:
        hidden, intermediate = hidden // 2, 2 * intermediate
    return _weight_descriptor(
        w2.view(experts, hidden // 8, 8, intermediate), [1, rows // 8, 8, _K_BYTES // w2.element_size()]
    )


def _launch_decode(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    shared: Tensor | None,
    out: Tensor,
    scales: ExpertScales,
    workspace: ExpertWorkspace,
    tile: DecodeTile,
    *,
    summed: bool,
    paired: bool,
) -> None:
    plan, h, y = workspace.plan, workspace.h, workspace.y
    experts_decode_kernel[(sm_count(x.device),)](
        x, x.stride(0), _interleaved(w13, tile.rows), _down_weights(w2, tile.rows, paired=paired),
        descriptor(h, [tile.tokens, _K_BYTES // h.element_size()]), h, h.stride(0), y, weights, shared, out,
        plan.rows, plan.slots, plan.tiles, plan.tile_count, workspace.ready, workspace.sync,
        scales.up, scales.inverse_h, scales.down, scales.token, workspace.h_unquantised, workspace.h_scales,
        workspace.parts, x.shape[0],
        H=w2.shape[1], WIDTH=w2.shape[2], TOP_K=ids.shape[1], TOKENS=tile.tokens, STAGES=tile.stages,
        WGS=tile.warpgroups, PROMOTE=tile.promote, SUM=summed_at_once(len(ids)) if summed else 0,
        BLOCKS=scales.of_blocks, PAIRED=paired,
        X_LAYOUT=_rows_layout(tile.tokens, x.dtype),
        num_warps=4, maxnreg=128, launch_pdl=True,
    )  # fmt: skip


def _launch_few(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    ids: Tensor,
    first_expert: int,
    shared: Tensor | None,
    out: Tensor,
    scales: ExpertScales,
    workspace: ExpertWorkspace,
    tile: FewTile,
) -> None:
    h, top_k, block_k = workspace.h, ids.shape[1], _K_BYTES // x.element_size()
    experts_few_kernel[(tile.ctas * sm_count(x.device),)](
        descriptor(x, [tile.tokens, block_k]), _interleaved(w13, tile.rows), _down_weights(w2, tile.rows),
        descriptor(h, [tile.tokens, block_k]), h, h.stride(0), weights, shared, out, ids, first_expert, len(w2),
        workspace.ready, workspace.sync,
        scales.up, scales.inverse_h, scales.down, scales.token, x.shape[0],
        H=w2.shape[1], WIDTH=w2.shape[2], TOP_K=top_k, PADDED=triton.next_power_of_2(top_k),
        STAGES=tile.stages, PROMOTE=tile.promote,
        num_warps=4, maxnreg=128, launch_pdl=True,
    )  # fmt: skip
