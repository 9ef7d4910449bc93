"""Choosing the experts of each token: fp32 scores, top-k with a selection bias, weights from the unbiased scores.

    scores  = sigmoid(x W^T)   or   softmax(x W^T)
    chosen  = the top_k of scores + selection_bias          (ties go to the lower expert)
    weights = scores[chosen] / (sum of them + 1e-20) * scale

The bias decides who is chosen, never how much they weigh (Hy3; DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Weight
and product stay in fp32: a bf16 router sends tokens to other experts than the model was trained with.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from katydid_kernels.linear import linear_reference

__all__ = ["router", "router_reference"]


def router(
    x: Tensor,
    weight: Tensor,
    *,
    top_k: int,
    scoring: Literal["sigmoid", "softmax"],
    selection_bias: Tensor | None = None,
    renormalise: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns weights fp32 ``[T, top_k]`` and expert ids int32 ``[T, top_k]``, best first.

    Args:
        x: ``[T, hidden]``.
        weight: fp32 ``[experts, hidden]``.
        selection_bias: fp32 ``[experts]``.
        renormalise: divide the chosen scores by their sum.
        scale: factor on the weights, last.
    """
    return router_reference(
        x,
        weight,
        top_k=top_k,
        scoring=scoring,
        selection_bias=selection_bias,
        renormalise=renormalise,
        scale=scale,
    )


def router_reference(
    x: Tensor,
    weight: Tensor,
    *,
    top_k: int,
    scoring: Literal["sigmoid", "softmax"],
    selection_bias: Tensor | None,
    renormalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    logits = linear_reference(x.float(), weight.float())
    # Not torch.sigmoid: it rounds the last few elements of a tensor by another path (see swiglu).
    scores = 1 / (1 + torch.exp(-logits)) if scoring == "sigmoid" else logits.softmax(dim=-1)
    preference = scores if selection_bias is None else scores + selection_bias
    # A stable sort keeps equal preferences in expert order; topk promises no order among them.
    ids = torch.sort(preference, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, ids.to(torch.int32)
