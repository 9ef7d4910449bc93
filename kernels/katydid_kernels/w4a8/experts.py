"""Routed experts of packed int4 on the Gluon kernels, in buffers made once.

The fewest tokens go through one persistent launch without a plan (`experts_few_kernel`), up to a tile an expert through
one after it (`experts_decode_kernel`), more through the grouped GEMM twice, then `gemm.combine`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from katydid_kernels.gemm.combine import combine
from katydid_kernels.gemm.experts import SUMMED_TOKENS
from katydid_kernels.gemm.launch import descriptor, sm_count
from katydid_kernels.gemm.plan import RoutePlan, plan_routes
from katydid_kernels.gemm.tuning import summed_at_once
from katydid_kernels.w4a8.experts_decode_kernel import experts_decode_w4a8_kernel
from katydid_kernels.w4a8.experts_few_kernel import experts_few_w4a8_kernel
from katydid_kernels.w4a8.launch import launch_grouped, rows_layout, weight_descriptors
from katydid_kernels.w4a8.packing import Int4Weight
from katydid_kernels.w4a8.tuning import FEW_EXPERTS_TILE, DecodeTile, GroupedTile, expert_tile

__all__ = ["UNPLANNED_PAIRS", "Int4ExpertWorkspace", "planned_tile", "run_experts_w4a8"]

_E4M3 = torch.float8_e4m3fn
# Up to here every pair is a tile of its own: making a plan would take longer than reading an expert twice. A CTA then
# has all of a token's experts, which must be more than one.
UNPLANNED_PAIRS = 48


@dataclass(frozen=True)
class Int4ExpertWorkspace:
    """Scratch made once: nothing is allocated while a batch runs, so its launches can be captured. For one stream."""

    plan: RoutePlan
    h: Tensor
    y: Tensor
    partial: Tensor
    counters: Tensor
    sync: Tensor

    @staticmethod
    def allocate(
        tokens: int, top_k: int, experts: int, hidden: int, intermediate: int, device: torch.device
    ) -> Int4ExpertWorkspace:
        """Scratch for batches of up to `tokens` rows."""
        pairs = tokens * top_k
        plan = RoutePlan.allocate(tokens, top_k, experts, device)
        padded = -(-intermediate // 256) * 256
        return Int4ExpertWorkspace(
            plan,
            # Zeros, because what pads a row up to a whole stage is multiplied (by zeros, but NaN would stay NaN).
            torch.zeros(pairs, padded, dtype=torch.uint8, device=device).view(_E4M3),
            torch.empty(pairs, hidden, dtype=torch.bfloat16, device=device),
            torch.empty(2 * sm_count(device), 2, 64, 8, device=device),
            torch.zeros(max(pairs, len(plan.tiles)) * (intermediate // 32 + 2), dtype=torch.int32, device=device),
            torch.zeros(3, dtype=torch.int32, device=device),
        )


def planned_tile(tokens: int, top_k: int, experts: int) -> DecodeTile | None:
    """The tile of few tokens, whose experts are one launch that reads a plan; None for others, with or without one."""
    pairs = tokens * top_k
    tile = expert_tile(pairs, experts)
    return tile if isinstance(tile, DecodeTile) and not _is_unplanned(pairs, top_k, experts) else None


def _is_unplanned(pairs: int, top_k: int, experts: int) -> bool:
    return 1 < top_k <= pairs <= min(UNPLANNED_PAIRS, experts)


def run_experts_w4a8(
    x: Tensor,
    w13: Int4Weight,
    w2: Int4Weight,
    weights: Tensor,
    ids: Tensor,
    x_scale: Tensor,
    h_scale: Tensor,
    out: Tensor,
    workspace: Int4ExpertWorkspace,
    *,
    first_expert: int = 0,
    shared: Tensor | None = None,
    tile: DecodeTile | GroupedTile | None = None,
    placed: bool = False,
) -> Tensor:
    """``out[t] = sum over j of weights[t, j] * w2[e] swiglu(w13[e] x[t]) + shared[t]``; arguments as
    `fused_moe_w4a8`'s.

    placed: the workspace's plan is filled already, for the tuned tile."""
    experts = len(w2.codes)
    tile = tile or expert_tile(ids.numel(), experts)
    if isinstance(tile, DecodeTile) and _is_unplanned(ids.numel(), ids.shape[1], experts):
        _launch_few(x, w13, w2, weights, ids, x_scale, h_scale, out, workspace, first_expert, shared)
        return out
    plan = workspace.plan
    if not placed:
        plan_routes(ids, plan, experts, tile.tokens, first_expert=first_expert)
    if isinstance(tile, DecodeTile):
        summed = len(ids) <= SUMMED_TOKENS
        _launch_decode(
            x, w13, w2, weights, ids.shape[1], x_scale, h_scale, out, workspace, shared, tile, summed=summed
        )  # fmt: skip
        if summed:
            return out
    else:
        h, y = workspace.h, workspace.y
        launch_grouped(
            x, w13, h, tile, plan.tiles, plan.tile_count, rows=plan.rows, x_scale=x_scale, h_scale=h_scale
        )  # fmt: skip
        launch_grouped(h, w2, y, tile, plan.tiles, plan.tile_count, h_scale=h_scale)
    return combine(workspace.y, plan.slots[: len(ids)], weights, out, shared=shared, early=True)


def _launch_few(
    x: Tensor,
    w13: Int4Weight,
    w2: Int4Weight,
    weights: Tensor,
    ids: Tensor,
    x_scale: Tensor,
    h_scale: Tensor,
    out: Tensor,
    workspace: Int4ExpertWorkspace,
    first_expert: int,
    shared: Tensor | None,
) -> None:
    experts_few_w4a8_kernel[(sm_count(x.device),)](
        x, x.stride(0), *weight_descriptors(w13), *weight_descriptors(w2), workspace.h, workspace.h.stride(0),
        weights, shared, out, ids, first_expert, len(w2.codes), workspace.partial, workspace.counters, workspace.sync,
        x_scale, h_scale, len(x),
        H=w2.rows, WIDTH=w2.cols, TOP_K=ids.shape[1], TOKENS=FEW_EXPERTS_TILE.tokens, STAGES=FEW_EXPERTS_TILE.stages,
        SCALE_A_TOKEN=x_scale.numel() > 1, X_LAYOUT=rows_layout(FEW_EXPERTS_TILE.tokens),
        num_warps=4, maxnreg=128, launch_pdl=True,
    )  # fmt: skip


def _launch_decode(
    x: Tensor,
    w13: Int4Weight,
    w2: Int4Weight,
    weights: Tensor,
    top_k: int,
    x_scale: Tensor,
    h_scale: Tensor,
    out: Tensor,
    workspace: Int4ExpertWorkspace,
    shared: Tensor | None,
    tile: DecodeTile,
    *,
    summed: bool,
) -> None:
    plan, h = workspace.plan, workspace.h
    experts_decode_w4a8_kernel[(sm_count(x.device),)](
        x, x.stride(0), *weight_descriptors(w13), *weight_descriptors(w2), descriptor(h, [tile.tokens, 128]), h,
        h.stride(0), workspace.y, weights, shared, out, plan.rows, plan.slots, plan.tiles, plan.tile_count,
        workspace.counters, workspace.sync, x_scale, h_scale, len(x),
        H=w2.rows, WIDTH=w2.cols, TOP_K=top_k, PADDED=triton.next_power_of_2(top_k),
        SUM=summed_at_once(len(x)) if summed else 0, TOKENS=tile.tokens, STAGES=tile.stages,
        SCALE_A_TOKEN=x_scale.numel() > 1, X_LAYOUT=rows_layout(tile.tokens),
        num_warps=4, maxnreg=128, launch_pdl=True,
    )  # fmt: skip
