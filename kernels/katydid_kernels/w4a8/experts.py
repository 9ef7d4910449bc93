"""Routed experts of packed int4 on the Gluon kernels, in buffers made once.

Up to a tile an expert go through one persistent launch after the plan (`experts_decode_kernel`), more through the
grouped GEMM twice, then `gemm.combine`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from katydid_kernels.gemm.combine import combine
from katydid_kernels.gemm.launch import descriptor, sm_count
from katydid_kernels.gemm.plain import scale_step
from katydid_kernels.gemm.plan import RoutePlan, plan_routes
from katydid_kernels.gemm.tuning import summed_at_once
from katydid_kernels.w4a8.experts_dealt_kernel import experts_dealt_w4a8_kernel
from katydid_kernels.w4a8.experts_decode_kernel import experts_decode_w4a8_kernel
from katydid_kernels.w4a8.experts_few_kernel import experts_few_w4a8_kernel
from katydid_kernels.w4a8.launch import launch_grouped, rows_layout, weight_descriptors
from katydid_kernels.w4a8.packing import Int4Weight
from katydid_kernels.w4a8.tuning import DecodeTile, GroupedTile, expert_tile

__all__ = ["UNPLANNED_PAIRS", "Int4ExpertWorkspace", "run_experts_w4a8"]

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
            torch.empty(4 * sm_count(device), 2, 64, 64, device=device),
            torch.zeros(max(pairs, len(plan.tiles)) * (intermediate // 32 + 2), dtype=torch.int32, device=device),
            torch.zeros(3, dtype=torch.int32, device=device),
        )


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
) -> Tensor:
    """``out[t] = sum over j of weights[t, j] * w2[e] swiglu(w13[e] x[t]) + shared[t]``; arguments as
    `fused_moe_w4a8`'s."""
    experts = len(w2.codes)
    tile = tile or expert_tile(ids.numel(), experts)
    plan = workspace.plan
    few = 1 < ids.shape[1] <= ids.numel() <= min(UNPLANNED_PAIRS, experts)
    planned = isinstance(tile, GroupedTile) or not few
    if planned:
        plan_routes(ids, plan, experts, tile.tokens, first_expert=first_expert)
    if isinstance(tile, DecodeTile):
        _launch_decode(x, w13, w2, weights, ids, x_scale, h_scale, out, workspace, first_expert, shared, tile, planned)
    else:
        h, y = workspace.h, workspace.y
        launch_grouped(
            x, w13, h, tile, plan.tiles, plan.tile_count, rows=plan.rows, x_scale=x_scale, h_scale=h_scale
        )  # fmt: skip
        launch_grouped(h, w2, y, tile, plan.tiles, plan.tile_count, h_scale=h_scale)
        combine(y, plan.slots[: len(ids)], weights, out, shared=shared, early=True)
    return out


def launch_few_experts(
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
    warps: int = 8,
    ctas: int = 2,
) -> Tensor:
    h = workspace.h
    words = x.view(torch.int32)
    experts_few_w4a8_kernel[(ctas * sm_count(x.device),)](
        words, words.stride(0), w13.codes.view(torch.int32), w13.scales, w2.codes.view(torch.int32), w2.scales,
        h, h.stride(0) // 4, weights, shared, out, ids, first_expert, len(w2.codes), workspace.counters, workspace.sync,
        x_scale, scale_step(x_scale), h_scale, len(x),
        H=w2.rows, WIDTH=w2.cols, TOP_K=ids.shape[1], WARPS=warps,
        GROUPS=triton.next_power_of_2(triton.cdiv(w2.rows, 128 * warps)),
        PAIRS=triton.next_power_of_2(triton.cdiv(ids.shape[1], warps)),
        EACH=triton.next_power_of_2(triton.cdiv(w2.cols, 128)),
        num_warps=warps, maxnreg=min(255, 2048 // (warps * ctas)), launch_pdl=True,
    )  # fmt: skip
    return out


def _launch_decode(
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
    tile: DecodeTile,
    planned: bool,
) -> None:
    plan = workspace.plan
    if planned and tile.row_warps == 9:
        h = workspace.h
        experts_dealt_w4a8_kernel[(sm_count(x.device),)](
            x, x.stride(0), *weight_descriptors(w13), *weight_descriptors(w2), descriptor(h, [tile.tokens, 128]), h,
            h.stride(0), workspace.y, weights, shared, out, plan.rows, plan.slots, plan.tiles, plan.tile_count,
            workspace.counters, workspace.sync, x_scale, h_scale, x.shape[0],
            H=w2.rows, WIDTH=w2.cols, TOP_K=ids.shape[1], PADDED=triton.next_power_of_2(ids.shape[1]),
            SUM=summed_at_once(len(x)), TOKENS=tile.tokens, STAGES=tile.stages, SCALE_A_TOKEN=x_scale.numel() > 1,
            X_LAYOUT=rows_layout(tile.tokens), num_warps=4, maxnreg=128, launch_pdl=True,
        )  # fmt: skip
        return
    sorted_pairs = (plan.rows, plan.slots, plan.tiles, plan.tile_count) if planned else (None, None, None, None)
    experts_decode_w4a8_kernel[(tile.ctas * sm_count(x.device),)](
        x, x.stride(0), *weight_descriptors(w13), *weight_descriptors(w2), workspace.h, workspace.h.stride(0),
        workspace.y, weights, shared, out, ids, first_expert, len(w2.codes), *sorted_pairs,
        workspace.partial, workspace.counters, workspace.sync, x_scale, h_scale, x.shape[0],
        H=w2.rows, WIDTH=w2.cols, TOP_K=ids.shape[1], PADDED=triton.next_power_of_2(ids.shape[1]),
        SUM=summed_at_once(len(x)), TOKENS=tile.tokens, STAGES=tile.stages, CTAS=tile.ctas, ROW_WARPS=tile.row_warps,
        SCALE_A_TOKEN=x_scale.numel() > 1, X_LAYOUT=rows_layout(tile.tokens),
        num_warps=4, maxnreg=(128 if tile.row_warps == 0 else 168) // tile.ctas // 8 * 8, launch_pdl=True,
    )  # fmt: skip
