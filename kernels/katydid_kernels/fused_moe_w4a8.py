"""Routed experts with int4 weights and fp8 activations: `fused_moe` at half the bytes.

    h = e4m3(swiglu(W13[e] x[t] * x_scale[t]) / h_scale)
    y[t] = sum over j of weights[t, j] * h_scale * W2[e] h,  e = ids[t, j],   (+ shared_output[t])

int4 values are exact in e4m3, so the only roundings are those of x and h. A rank that holds experts ``first_expert ..
first_expert + E - 1`` skips ids outside them; adding the ranks' outputs gives the whole.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from katydid_kernels.fused_moe import check_expert_ids
from katydid_kernels.gemm.dense import runs_gluon
from katydid_kernels.linear import linear_reference
from katydid_kernels.swiglu import swiglu_reference
from katydid_kernels.w4a8.packing import Int4Weight, dequantize_int4, unpack_int4

if TYPE_CHECKING:
    from katydid_kernels.gemm.plan import PlacedPairs
    from katydid_kernels.w4a8.experts import Int4ExpertWorkspace

__all__ = ["fused_moe_w4a8", "fused_moe_w4a8_reference", "pairs_to_place_w4a8"]

_E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0


def fused_moe_w4a8(
    x: Tensor,
    w13: Int4Weight,
    w2: Int4Weight,
    topk_weights: Tensor,
    topk_ids: Tensor,
    x_scale: Tensor,
    h_scale: Tensor,
    *,
    first_expert: int = 0,
    shared_output: Tensor | None = None,
    num_experts: int | None = None,
    placed: PlacedPairs | None = None,
) -> Tensor:
    """Returns bf16 ``[T, hidden]``.

    On Hopper GPUs it runs as Gluon kernels where hidden is a multiple of 128 and n of 64; their scratch is kept for the
    next batch, so one stream at a time may run experts of one shape.

    Args:
        x: e4m3 ``[T, hidden]``.
        w13: packed ``[E, 2 * n, hidden]``, gated.
        w2: packed ``[E, hidden, n]``.
        topk_weights: fp32 ``[T, top_k]``.
        topk_ids: int32 ``[T, top_k]``, over all experts of the model.
        x_scale: fp32 of one element, or ``[T]``: what x was divided by.
        h_scale: fp32 of one element: what h is divided by before it is rounded to e4m3.
        first_expert: id of the first packed expert.
        shared_output: ``[T, hidden]``, added in fp32 before rounding.
        num_experts: experts of the whole model, to check ids against.
        placed: of `pairs_to_place_w4a8` for this batch, its plan filled by who chose the experts.

    Raises ValueError for shapes, dtypes or scales that do not fit each other and, where the ids are on the host, for
    one that is not in ``[0, num_experts)``; on the GPU such an id is skipped.
    """
    _check(x, w13, w2, topk_weights, topk_ids, x_scale, h_scale, shared_output)
    check_expert_ids(topk_ids, num_experts)
    if len(x) and _runs_gluon(w2, x.device):
        # Imported where it runs: the kernels speak to one generation of GPUs and of Triton.
        from katydid_kernels.w4a8.experts import run_experts_w4a8

        return run_experts_w4a8(
            x.contiguous(), w13, w2, topk_weights.contiguous(), topk_ids.contiguous(), x_scale.contiguous(), h_scale,
            torch.empty(x.shape, dtype=torch.bfloat16, device=x.device),
            _workspace(_capacity(len(x)), topk_ids.shape[1], len(w2.codes), w2.rows, w2.cols, x.device),
            first_expert=first_expert, shared=None if shared_output is None else shared_output.contiguous(),
            placed=placed is not None,
        )  # fmt: skip
    return fused_moe_w4a8_reference(
        x, w13, w2, topk_weights, topk_ids, x_scale, h_scale, first_expert=first_expert, shared_output=shared_output
    )


def pairs_to_place_w4a8(tokens: int, top_k: int, w2: Int4Weight, *, first_expert: int = 0) -> PlacedPairs | None:
    """The plan that `fused_moe_w4a8` would make in a launch of its own before the experts of few tokens: who chooses
    them may fill it (``router(placed=)``). None where there is no such launch.

    Args:
        top_k: columns of the ids.
    """
    device = w2.codes.device
    if not tokens or not _runs_gluon(w2, device):
        return None
    from katydid_kernels.gemm.plan import PlacedPairs
    from katydid_kernels.w4a8.experts import planned_tile

    tile = planned_tile(tokens, top_k, len(w2.codes))
    if tile is None:
        return None
    workspace = _workspace(_capacity(tokens), top_k, len(w2.codes), w2.rows, w2.cols, device)
    return PlacedPairs(workspace.plan, len(w2.codes), tile.tokens, first_expert)


def _runs_gluon(w2: Int4Weight, device: torch.device) -> bool:
    return device.type == "cuda" and runs_gluon(device) and w2.rows % 128 == 0 and w2.cols % 64 == 0


def _capacity(tokens: int) -> int:
    return max(64, 1 << (tokens - 1).bit_length())


@functools.lru_cache(maxsize=16)
def _workspace(
    tokens: int, top_k: int, experts: int, hidden: int, width: int, device: torch.device
) -> Int4ExpertWorkspace:
    from katydid_kernels.w4a8.experts import Int4ExpertWorkspace

    return Int4ExpertWorkspace.allocate(tokens, top_k, experts, hidden, width, device)


def _check(
    x: Tensor,
    w13: Int4Weight,
    w2: Int4Weight,
    topk_weights: Tensor,
    topk_ids: Tensor,
    x_scale: Tensor,
    h_scale: Tensor,
    shared_output: Tensor | None,
) -> None:
    if x.ndim != 2 or x.dtype != _E4M3:
        raise ValueError(f"x must be float8_e4m3fn [T, hidden], got {x.dtype} {tuple(x.shape)}")
    tokens, hidden = x.shape
    if not w13.gated or w2.gated or w13.codes.ndim != 4 or w2.codes.ndim != 4 or len(w13.codes) != len(w2.codes):
        raise ValueError(
            f"w13 must be packed gated experts and w2 as many not gated, got codes {tuple(w13.codes.shape)} "
            f"gated={w13.gated} and {tuple(w2.codes.shape)} gated={w2.gated}"
        )
    if w13.cols != hidden or w2.rows != hidden or w13.rows != 2 * w2.cols:
        raise ValueError(
            f"w13 [2n, {hidden}] and w2 [{hidden}, n] must fit x of {hidden} columns, "
            f"got [{w13.rows}, {w13.cols}] and [{w2.rows}, {w2.cols}]"
        )
    if topk_ids.dtype != torch.int32 or topk_ids.ndim != 2 or len(topk_ids) != tokens:
        raise ValueError(f"topk_ids must be int32 [{tokens}, top_k], got {topk_ids.dtype} {tuple(topk_ids.shape)}")
    if topk_weights.dtype != torch.float32 or topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights must be fp32 {tuple(topk_ids.shape)}, got {topk_weights.dtype} {tuple(topk_weights.shape)}"
        )
    for name, scale, sizes in (("x_scale", x_scale, {1, tokens}), ("h_scale", h_scale, {1})):
        if scale.dtype != torch.float32 or scale.numel() not in sizes:
            raise ValueError(
                f"{name} must be fp32 with {' or '.join(map(str, sorted(sizes)))} elements, "
                f"got {scale.dtype} {tuple(scale.shape)}"
            )
    if shared_output is not None and shared_output.shape != x.shape:
        raise ValueError(f"shared_output must be [{tokens}, {hidden}], got {list(shared_output.shape)}")


def fused_moe_w4a8_reference(
    x: Tensor,
    w13: Int4Weight,
    w2: Int4Weight,
    topk_weights: Tensor,
    topk_ids: Tensor,
    x_scale: Tensor,
    h_scale: Tensor,
    *,
    first_expert: int = 0,
    shared_output: Tensor | None = None,
) -> Tensor:
    """`fused_moe_w4a8` in torch, expert by expert: what it computes, and what runs without a GPU."""
    wide = x.float() * x_scale.reshape(-1, 1)
    # One row per (token, choice) first, then a sum in the order of choice: a token's rounding never depends on
    # which other tokens share its experts.
    parts = wide.new_zeros((*topk_ids.shape, x.shape[1]))
    local_ids = topk_ids.long() - first_expert
    hit: list[int] = local_ids.unique().tolist()
    for expert in hit:
        if 0 <= expert < len(w13.codes):
            token, choice = torch.where(local_ids == expert)
            gate_up = linear_reference(wide[token], _expert(w13, expert))
            h = (swiglu_reference(gate_up) / h_scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(_E4M3)
            parts[token, choice] = linear_reference(h.float(), _expert(w2, expert)) * h_scale
    total = torch.zeros_like(parts[:, 0])
    for column in range(topk_ids.shape[1]):
        total += topk_weights[:, column, None] * parts[:, column]
    if shared_output is not None:
        total += shared_output.float()
    return total.bfloat16()


def _expert(weight: Int4Weight, expert: int) -> Tensor:
    one = Int4Weight(weight.codes[expert], weight.scales[expert], weight.rows, weight.cols, weight.gated)
    return dequantize_int4(*unpack_int4(one))
