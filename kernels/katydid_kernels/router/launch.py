"""Launches of the router's kernels: grids, slices of K, scratch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from katydid_kernels.gemm.launch import REGISTERS, descriptor, sm_count
from katydid_kernels.gemm.plan import PlacedPairs
from katydid_kernels.router.few_kernel import few_tokens_kernel
from katydid_kernels.router.many_kernel import many_tokens_kernel
from katydid_kernels.router.normed_kernel import normed_router_kernel
from katydid_kernels.router.weight import BLOCK_K, CHUNK_EXPERTS, OnHopper, experts_per_tile

__all__ = ["Choice", "Slices", "launch_few", "launch_many", "launch_normed", "many_splits"]

TILE_TOKENS = 128
# Short stages: a stage that is being multiplied, or has just been, is not on its way.
STAGE_K = 32
# Of 227 KiB; the rest is what turns a tile for its way out.
SHARED_BYTES = 200 * 1024


@dataclass(frozen=True)
class Choice:
    """How experts are chosen, and where the result goes; `router`'s arguments of these names."""

    top_k: int
    scoring: Literal["sigmoid", "softmax"]
    selection_bias: Tensor | None
    renormalise: bool
    scale: float
    weights: Tensor
    ids: Tensor
    shared: bool = False

    @property
    def columns(self) -> int:
        """Of weights and ids."""
        return self.top_k + self.shared


@dataclass(frozen=True)
class Slices:
    """How `few_tokens_kernel` cuts the weight.

    depth: blocks of K a CTA.
    parts: of a slice, multiplied as they arrive.
    at_once: tokens that a CTA chooses for.
    group: tokens of which a CTA reads a slice.
    """

    depth: int
    parts: int
    at_once: int
    group: int = 16


def few_slices(hidden: int) -> Slices:
    """Measured on one H200 with 192 experts of 4096: long slices, for each is a trip through L2 for every token, and
    little of x for each CTA, since x is what it waits for. A token's bits do not depend on the batch.
    """
    return Slices(slice_depth(hidden), 1, 1)


def slice_depth(hidden: int) -> int:
    """Up to 8 blocks of K, as many as divide it."""
    return next(depth for depth in (8, 4, 2, 1) if hidden % (depth * BLOCK_K) == 0)


def _blocked_terms(terms: Tensor, depth: int) -> TensorDescriptor:
    """A TMA descriptor over ``[TERMS, E_PAD, K]`` seen as ``[K / 64, TERMS * E_PAD, 64]``."""
    count, padded, hidden = terms.shape
    box = [depth, CHUNK_EXPERTS, BLOCK_K]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    shape = [hidden // BLOCK_K, count * padded, BLOCK_K]
    return TensorDescriptor(terms, shape, [BLOCK_K, hidden, 1], box, layout)


def launch_few(
    x: Tensor,
    weight: OnHopper,
    experts: int,
    choice: Choice,
    *,
    slices: Slices | None = None,
    placed: PlacedPairs | None = None,
) -> None:
    """Up to FEW_TOKENS tokens."""
    count, padded, hidden = weight.terms.shape
    tokens = x.shape[0]
    slices = few_slices(hidden) if slices is None else slices
    splits = hidden // (slices.depth * BLOCK_K)
    depth = slices.depth // slices.parts
    rows = max(8, triton.next_power_of_2(min(tokens, slices.group)))
    few_tokens_kernel[(splits * (padded // CHUNK_EXPERTS) * triton.cdiv(tokens, slices.group),)](
        x, x.stride(0) // 8, _blocked_terms(weight.terms, depth),
        weight.handover, choice.selection_bias, choice.scale, choice.weights, choice.ids, tokens, experts,
        *_plan_tensors(placed), TOKENS=rows, GROUP=slices.group,
        X_LAYOUT=gl.NVMMASharedLayout.get_default_for([depth, rows, BLOCK_K], gl.bfloat16),
        E_PAD=padded, TERMS=count, PARTS=slices.parts, SPLITS=splits, POWER_S=max(4, triton.next_power_of_2(splits)),
        AT_ONCE=slices.at_once, TOP_K=choice.top_k, POWER_K=triton.next_power_of_2(choice.columns),
        SHARED=int(choice.shared),
        SIGMOID=choice.scoring == "sigmoid", RENORMALISE=choice.renormalise,
        TILE=0 if placed is None else placed.tile_rows, BLOCK=triton.next_power_of_2(choice.ids.numel()),
        BLOCK_E=1 if placed is None else triton.next_power_of_2(placed.experts), num_warps=4, launch_pdl=True,
    )  # fmt: skip


def _plan_tensors(placed: PlacedPairs | None) -> tuple[Tensor | int | None, ...]:
    if placed is None:
        return None, None, None, None, None, 0, 0
    plan = placed.plan
    return plan.scratch, plan.rows, plan.slots, plan.tiles, plan.tile_count, placed.first_expert, placed.experts


def launch_normed(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    total: Tensor,
    y: Tensor,
    q: Tensor | None,
    given_scale: Tensor | None,
    q_scale: Tensor | None,
    weight: OnHopper,
    experts: int,
    choice: Choice,
    *,
    depth: int | None = None,
) -> None:
    """Up to 8 tokens, with what `normed_router_kernel` makes before; `q_scale` as it is returned."""
    count, padded, hidden = weight.terms.shape
    tokens = x.shape[0]
    depth = slice_depth(hidden) if depth is None else depth
    splits = hidden // (depth * BLOCK_K)
    normed_router_kernel[(splits * (padded // CHUNK_EXPERTS),)](
        x, x.stride(0), residual, residual.stride(0), norm_weight, eps, total, y, q, given_scale, q_scale,
        _blocked_terms(weight.terms, depth),
        weight.handover, choice.selection_bias, choice.scale, choice.weights, choice.ids, tokens, experts,
        HIDDEN=hidden, ROWS=triton.next_power_of_2(tokens),
        X_LAYOUT=gl.NVMMASharedLayout.get_default_for([depth, 8, BLOCK_K], gl.bfloat16),
        E_PAD=padded, TERMS=count, SPLITS=splits, POWER_S=max(4, triton.next_power_of_2(splits)),
        AT_ONCE=1, TOP_K=choice.top_k, POWER_K=triton.next_power_of_2(choice.columns), SHARED=int(choice.shared),
        SIGMOID=choice.scoring == "sigmoid", RENORMALISE=choice.renormalise, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def many_splits(tokens: int, expert_tiles: int, sms: int) -> int:
    """Slices of K, a power of two, so that the tiles of tokens and experts keep the GPU busy in one round."""
    tiles = triton.cdiv(tokens, TILE_TOKENS) * expert_tiles
    splits = 1
    while splits < 16 and 2 * splits * tiles <= sms:
        splits *= 2
    return splits


def launch_many(x: Tensor, weight: OnHopper, experts: int, choice: Choice, *, splits: int | None = None) -> None:
    """Up to ``128 * MOST_TILES`` tokens."""
    count, padded, hidden = weight.terms.shape
    tokens = x.shape[0]
    tile_experts = experts_per_tile(experts)
    expert_tiles = padded // tile_experts
    if splits is None:
        splits = many_splits(tokens, expert_tiles, sm_count(x.device))
    stage_bytes = (TILE_TOKENS + count * tile_experts) * STAGE_K * 2
    partial = torch.empty(splits, tokens, padded, device=x.device)
    warpgroups = tile_experts // CHUNK_EXPERTS
    many_tokens_kernel[(triton.cdiv(tokens, TILE_TOKENS) * splits * expert_tiles,)](
        descriptor(x, [TILE_TOKENS, STAGE_K]), descriptor(weight.terms.view(-1, hidden), [CHUNK_EXPERTS, STAGE_K]),
        partial, weight.counters, choice.selection_bias, choice.scale, choice.weights, choice.ids, tokens, experts,
        triton.cdiv(hidden, STAGE_K),
        E_PAD=padded, TERMS=count, WGS=warpgroups, STAGES=min(8, SHARED_BYTES // stage_bytes), SPLITS=splits,
        TOP_K=choice.top_k, POWER_K=triton.next_power_of_2(choice.columns), SHARED=int(choice.shared),
        SIGMOID=choice.scoring == "sigmoid",
        RENORMALISE=choice.renormalise, num_warps=4, maxnreg=REGISTERS[warpgroups], launch_pdl=True,
    )  # fmt: skip
