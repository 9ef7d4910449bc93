"""Routed experts: each token through its chosen SwiGLU experts, summed with the router's weights in fp32.

    y[t] = sum over j of weights[t, j] * W2[e] swiglu(W13[e] x[t]),  e = ids[t, j],   (+ shared_output[t])

A rank that holds experts ``first_expert .. first_expert + E - 1`` skips ids outside them; adding the ranks' outputs
gives the whole. At decode it is bound by reading the weights of the experts hit, at prefill by the two GEMMs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from katydid_kernels.gemm.dense import BLOCK, gemm_reference
from katydid_kernels.gemm.expert_scales import ExpertScales
from katydid_kernels.linear import linear_reference
from katydid_kernels.quantize_rows import FP8_MAX, quantize_fp8_reference
from katydid_kernels.swiglu import swiglu_reference

if TYPE_CHECKING:
    from katydid_kernels.gemm.experts import ExpertWorkspace
    from katydid_kernels.gemm.plan import PlacedPairs

__all__ = ["check_expert_ids", "fused_moe", "fused_moe_reference", "moe_waits", "pairs_to_place"]


def fused_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    first_expert: int = 0,
    shared_output: Tensor | None = None,
    scales: ExpertScales | None = None,
    num_experts: int | None = None,
    placed: PlacedPairs | None = None,
) -> Tensor:
    """Returns ``[T, hidden]`` in the dtype of ``x``, bf16 for e4m3.

    On Hopper GPUs bf16 and e4m3 run as Gluon kernels where hidden is a multiple of 128 and n of 64; their scratch is
    kept for the next batch, so one stream at a time may run experts of one shape.

    Args:
        x: ``[T, hidden]``.
        w13: ``[E, 2 * n, hidden]``: rows of gate, then rows of up.
        w2: ``[E, hidden, n]``.
        topk_weights: fp32 ``[T, top_k]``.
        topk_ids: int32 ``[T, top_k]``, over all experts of the model; those of other ranks are skipped.
        first_expert: id of ``w13[0]``.
        shared_output: ``[T, hidden]``, added in fp32 before rounding.
        scales: of quantised x, w13 and w2; of tensors, or of blocks of 128.
        num_experts: experts of the whole model, to check ids against.
        placed: of `pairs_to_place` for this batch, its plan filled by who chose the experts.

    Raises ValueError for shapes or scales that do not fit each other and, where the ids are on the host, for one that
    is not in ``[0, num_experts)``; on the GPU such an id is skipped.
    """
    _check(x, w13, w2, topk_weights, topk_ids, scales, num_experts)
    if _runs_gluon(x, w13, w2):
        return _fused_moe_gluon(x, w13, w2, topk_weights, topk_ids, first_expert, shared_output, scales, placed)
    return fused_moe_reference(
        x, w13, w2, topk_weights, topk_ids, first_expert=first_expert, shared_output=shared_output, scales=scales
    )


def _check(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    scales: ExpertScales | None,
    num_experts: int | None,
) -> None:
    experts, hidden, width = w2.shape
    if w13.shape != (experts, 2 * width, hidden):
        raise ValueError(
            f"w13 must be [{experts}, {2 * width}, {hidden}] beside w2 {list(w2.shape)}, got {list(w13.shape)}"
        )
    if x.shape[1] != hidden:
        raise ValueError(f"x must be [T, {hidden}], got {list(x.shape)}")
    if topk_ids.shape != topk_weights.shape or len(topk_ids) != len(x):
        found = f"{list(topk_ids.shape)} and {list(topk_weights.shape)}"
        raise ValueError(f"topk_ids and topk_weights must be [{len(x)}, top_k], got {found}")
    if scales is not None and scales.of_blocks:
        scales.check_blocks(len(x), experts, hidden, width)
    check_expert_ids(topk_ids, num_experts)


def check_expert_ids(topk_ids: Tensor, num_experts: int | None) -> None:
    """Raises ValueError for an id that is not in ``[0, num_experts)``. Ids on a GPU are not read: that would wait for
    the device; kernels skip what is outside."""
    if topk_ids.is_cuda or not topk_ids.numel():
        return
    low, high = int(topk_ids.min()), int(topk_ids.max())
    if low < 0 or (num_experts is not None and high >= num_experts):
        limit = "experts" if num_experts is None else num_experts
        raise ValueError(f"topk_ids must be in [0, {limit}), got {low if low < 0 else high}")


def moe_waits(dtype: torch.dtype, hidden: int, width: int, device: torch.device) -> bool:
    """Whether experts of these sizes, over rows of ``dtype``, run as the reference, which reads ids on the host: what
    calls them cannot be captured as a graph."""
    fits = dtype in (torch.bfloat16, torch.float8_e4m3fn) and hidden % 128 == 0 and width % 64 == 0
    return not (fits and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0))


def _runs_gluon(x: Tensor, w13: Tensor, w2: Tensor) -> bool:
    if not x.is_cuda or len(x) == 0 or moe_waits(x.dtype, w2.shape[1], w2.shape[2], x.device):
        return False
    return w13.is_contiguous() and w2.is_contiguous()


def _fused_moe_gluon(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    first_expert: int,
    shared_output: Tensor | None,
    scales: ExpertScales | None,
    placed: PlacedPairs | None,
) -> Tensor:
    # Imported where it runs: the kernels speak to one generation of GPUs and of Triton.
    from katydid_kernels.gemm.experts import run_experts

    of_blocks = scales is not None and scales.of_blocks
    workspace = _workspace(_capacity(len(x)), topk_ids.shape[1], tuple(w2.shape), w2.dtype, w2.device, of_blocks)
    return run_experts(
        x.contiguous(),
        w13,
        w2,
        topk_weights.contiguous(),
        topk_ids.contiguous(),
        torch.empty(len(x), w2.shape[1], dtype=torch.bfloat16, device=x.device),
        scales or _no_scales(len(w2), w2.device),
        workspace,
        first_expert=first_expert,
        shared=None if shared_output is None else shared_output.contiguous(),
        placed=placed is not None,
    )


def pairs_to_place(
    tokens: int,
    top_k: int,
    w2: Tensor,
    *,
    dtype: torch.dtype,
    first_expert: int = 0,
    of_blocks: bool = False,
) -> PlacedPairs | None:
    """The plan that `fused_moe` would make in a launch of its own before the experts of few tokens: who chooses them
    may fill it (``router(placed=)``). None where there is no such launch.

    Args:
        top_k: columns of the ids.
        dtype: of the rows.
    """
    if not tokens or moe_waits(dtype, w2.shape[1], w2.shape[2], w2.device):
        return None
    from katydid_kernels.gemm.experts import choose_tile
    from katydid_kernels.gemm.plan import PlacedPairs
    from katydid_kernels.gemm.tuning import DecodeTile

    tile = choose_tile(tokens * top_k, len(w2), w2.shape[2], w2.shape[1], w2.dtype, of_blocks=of_blocks)
    if not isinstance(tile, DecodeTile):
        return None
    workspace = _workspace(_capacity(tokens), top_k, tuple(w2.shape), w2.dtype, w2.device, of_blocks)
    return PlacedPairs(workspace.plan, len(w2), tile.tokens, first_expert)


def _capacity(tokens: int) -> int:
    return max(64, 1 << (tokens - 1).bit_length())


@functools.cache
def _workspace(
    tokens: int, top_k: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, of_blocks: bool
) -> ExpertWorkspace:
    """Scratch kept for good: graphs that were captured with it hold its addresses."""
    from katydid_kernels.gemm.experts import ExpertWorkspace

    return ExpertWorkspace.allocate(tokens, top_k, shape, dtype, device, of_blocks=of_blocks)


@functools.cache
def _no_scales(experts: int, device: torch.device) -> ExpertScales:
    return ExpertScales.ones(experts, device)


def fused_moe_reference(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    first_expert: int,
    shared_output: Tensor | None,
    scales: ExpertScales | None = None,
) -> Tensor:
    """`fused_moe` in torch, expert by expert: what it computes, and what runs without a GPU."""
    # One row per (token, choice) first, then a sum in the order of choice: a token's rounding never depends on
    # which other tokens share its experts.
    parts = torch.zeros((*topk_ids.shape, w2.shape[1]), dtype=torch.float32, device=x.device)
    local_ids = topk_ids.long() - first_expert
    hit: list[int] = local_ids.unique().tolist()
    for expert in hit:
        if 0 <= expert < w13.shape[0]:
            token, choice = torch.where(local_ids == expert)
            if scales is None:
                hidden = swiglu_reference(linear_reference(x[token], w13[expert]))
                parts[token, choice] = linear_reference(hidden, w2[expert]).float()
            else:
                parts[token, choice] = _scaled_expert(x, token, w13[expert], w2[expert], scales, expert)
    total = torch.zeros_like(parts[:, 0])
    for column in range(topk_ids.shape[1]):
        total += topk_weights[:, column, None] * parts[:, column]
    if shared_output is not None:
        total += shared_output.float()
    return total.to(torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype)


def _scaled_expert(x: Tensor, token: Tensor, w13: Tensor, w2: Tensor, scales: ExpertScales, expert: int) -> Tensor:
    """fp32 ``[rows, hidden]`` of one expert over rows ``token`` of x; h is rounded as the kernels round it."""
    if scales.of_blocks:
        return _block_scaled_expert(x, token, w13, w2, scales, expert)
    rows = x[token].float()
    if scales.token is not None:
        rows *= scales.token[token, None]
    gate, up = linear_reference(rows, w13.float()).chunk(2, dim=1)
    h = swiglu_reference(torch.cat((gate * scales.up[expert, 0], up * scales.up[expert, 1]), dim=1)) * scales.inverse_h
    if w2.dtype == torch.float8_e4m3fn:
        h = h.clamp(-FP8_MAX, FP8_MAX)
    return linear_reference(h.to(w2.dtype).float(), w2.float()) * scales.down[expert]


def _block_scaled_expert(
    x: Tensor, token: Tensor, w13: Tensor, w2: Tensor, scales: ExpertScales, expert: int
) -> Tensor:
    """The same with scales of blocks; h is rounded to bf16, then quantised by the largest of every 128 columns."""
    assert scales.token is not None
    gate_up = gemm_reference(
        x[token], w13, row_scale=scales.token[token], col_scale=scales.up[expert], out_dtype=torch.float32
    )
    h, h_scale = quantize_fp8_reference(swiglu_reference(gate_up).bfloat16(), group=BLOCK)
    return gemm_reference(h, w2, row_scale=h_scale, col_scale=scales.down[expert], out_dtype=torch.float32)
