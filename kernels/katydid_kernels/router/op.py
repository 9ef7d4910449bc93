"""Choosing the experts of each token: fp32 scores, top-k with a selection bias, weights from the unbiased scores.

    scores  = sigmoid(x W^T)   or   softmax(x W^T)
    chosen  = the top_k of scores + selection_bias          (ties go to the lower expert)
    weights = scores[chosen] / (sum of them + 1e-20) * scale

The bias decides who is chosen, never how much they weigh (Hy3; DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Weight
and product stay in fp32: a bf16 router sends tokens to other experts than the model was trained with. On Hopper the
fp32 weight is a sum of bf16 terms (`weight.py`), so that tensor cores can multiply it; all of it is one launch, bound
by reading the weights (3 MB for 192 experts of 4096) for few tokens and by the tensor cores for many.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from katydid_kernels.gemm.plan import PlacedPairs
from katydid_kernels.linear import linear_reference
from katydid_kernels.router.weight import BLOCK_K, FEW_TOKENS, MOST_TILES, RouterWeight

__all__ = ["fits_copy_engine", "router", "router_reference"]

_MOST_TOKENS = 128 * MOST_TILES


def router(
    x: Tensor,
    weight: RouterWeight | Tensor,
    *,
    top_k: int,
    scoring: Literal["sigmoid", "softmax"],
    selection_bias: Tensor | None = None,
    renormalise: bool = True,
    scale: float = 1.0,
    shared: bool = False,
    placed: PlacedPairs | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns weights fp32 ``[T, top_k]`` and expert ids int32 ``[T, top_k]``, best first.

    A model calls ``RouterWeight.prepare(weight)`` once at load and passes the result; with a plain tensor, or x that is
    not bf16 or not in blocks of 64, the reference runs. Launched early (PDL), the kernels read their weights at once
    and x when the kernel that makes it has finished.

    Args:
        x: ``[T, hidden]``.
        weight: of ``[experts, hidden]``, prepared, or the fp32 tensor itself.
        selection_bias: fp32 ``[experts]``.
        renormalise: divide the chosen scores by their sum.
        scale: factor on the weights, last.
        shared: a column more: every token goes to an expert behind the others, with weight 1.
        placed: fill its plan with the pairs; up to 64 tokens on Hopper in the same launch.

    Raises ValueError where shapes do not fit, or top_k exceeds the experts.
    """
    matrix = weight if isinstance(weight, Tensor) else weight.weight
    experts = matrix.shape[0]
    if x.ndim != 2 or x.shape[1] != matrix.shape[1]:
        raise ValueError(f"x must be [T, {matrix.shape[1]}] as weight has it, got {list(x.shape)}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be 1 to the {experts} experts, got {top_k}")
    if selection_bias is not None and selection_bias.shape != (experts,):
        raise ValueError(f"selection_bias must be [{experts}], got {list(selection_bias.shape)}")
    hopper = None if isinstance(weight, Tensor) else weight.hopper
    if hopper is None or not fits_copy_engine(x):
        weights, ids = router_reference(
            x,
            matrix,
            top_k=top_k,
            scoring=scoring,
            selection_bias=selection_bias,
            renormalise=renormalise,
            scale=scale,
            shared=shared,
        )
        if placed is not None:
            placed.place(ids)
        return weights, ids
    # Imported where it runs: the kernels speak to one generation of GPUs and of Triton.
    from katydid_kernels.router.launch import Choice, launch_few, launch_many

    weights = torch.empty(x.shape[0], top_k + shared, device=x.device)
    ids = torch.empty(x.shape[0], top_k + shared, dtype=torch.int32, device=x.device)
    if x.shape[0] <= FEW_TOKENS:
        choice = Choice(top_k, scoring, selection_bias, renormalise, scale, weights, ids, shared)
        launch_few(x, hopper, experts, choice, placed=placed)
        return weights, ids
    for start in range(0, x.shape[0], _MOST_TOKENS):
        part = slice(start, start + _MOST_TOKENS)
        choice = Choice(top_k, scoring, selection_bias, renormalise, scale, weights[part], ids[part], shared)
        launch_many(x[part], hopper, experts, choice)
    if placed is not None:
        placed.place(ids)
    return weights, ids


def fits_copy_engine(x: Tensor) -> bool:
    """The kernels take bf16 rows whose base and stride are multiples of 16 bytes (TMA), in whole blocks of 64."""
    aligned = x.stride(1) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0
    return x.dtype == torch.bfloat16 and aligned and x.shape[1] % BLOCK_K == 0


def router_reference(
    x: Tensor,
    weight: Tensor,
    *,
    top_k: int,
    scoring: Literal["sigmoid", "softmax"],
    selection_bias: Tensor | None,
    renormalise: bool,
    scale: float,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """`router` in torch and fp32: what it computes, and what runs without a GPU."""
    logits = linear_reference(x.float(), weight.float())
    # Not torch.sigmoid: it rounds the last few elements of a tensor by another path (see swiglu).
    scores = 1 / (1 + torch.exp(-logits)) if scoring == "sigmoid" else logits.softmax(dim=-1)
    preference = scores if selection_bias is None else scores + selection_bias
    # A stable sort keeps equal preferences in expert order; topk promises no order among them.
    ids = torch.sort(preference, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    weights, ids = weights * scale, ids.to(torch.int32)
    if shared:
        column = ids.new_full((len(ids), 1), len(weight))
        weights, ids = torch.cat((weights, torch.ones_like(weights[:, :1])), 1), torch.cat((ids, column), 1)
    return weights, ids
