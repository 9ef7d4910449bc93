"""Routed experts: each token through its chosen SwiGLU experts, summed with the router's weights in fp32.

    y[t] = sum over j of weights[t, j] * W2[e] swiglu(W13[e] x[t]),  e = ids[t, j],   (+ shared_output[t])

A rank that holds experts ``first_expert .. first_expert + E - 1`` skips ids outside them; adding the ranks' outputs
gives the whole. At decode it is bound by reading the weights of the experts hit, at prefill by the two GEMMs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_kernels.linear import linear_reference
from katydid_kernels.swiglu import swiglu_reference

__all__ = ["fused_moe", "fused_moe_reference"]


def fused_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    first_expert: int = 0,
    shared_output: Tensor | None = None,
) -> Tensor:
    """Returns ``[T, hidden]`` in the dtype of ``x``.

    Args:
        x: ``[T, hidden]``.
        w13: ``[E, 2 * n, hidden]``: rows of gate, then rows of up.
        w2: ``[E, hidden, n]``.
        topk_weights: fp32 ``[T, top_k]``.
        topk_ids: int32 ``[T, top_k]``, over all experts of the model.
        first_expert: id of ``w13[0]``.
        shared_output: ``[T, hidden]``, added in fp32 before rounding.
    """
    return fused_moe_reference(
        x, w13, w2, topk_weights, topk_ids, first_expert=first_expert, shared_output=shared_output
    )


def fused_moe_reference(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    first_expert: int,
    shared_output: Tensor | None,
) -> Tensor:
    # One row per (token, choice) first, then a sum in the order of choice: a token's rounding never depends on
    # which other tokens share its experts.
    parts = x.new_zeros((*topk_ids.shape, x.shape[1]), dtype=torch.float32)
    local_ids = topk_ids.long() - first_expert
    hit: list[int] = local_ids.unique().tolist()
    for expert in hit:
        if 0 <= expert < w13.shape[0]:
            token, choice = torch.where(local_ids == expert)
            hidden = swiglu_reference(linear_reference(x[token], w13[expert]))
            parts[token, choice] = linear_reference(hidden, w2[expert]).float()
    total = torch.zeros_like(parts[:, 0])
    for column in range(topk_ids.shape[1]):
        total += topk_weights[:, column, None] * parts[:, column]
    if shared_output is not None:
        total += shared_output.float()
    return total.to(x.dtype)
