"""What stands before the experts of a layer: residual addition, RMSNorm, quantisation and the router, as one op.

    total = x + residual;  y = total / rms(total) * norm_weight;  q = e4m3(y / q_scale);  experts of y

A decode step of a few tokens spends more on launching these one by one than on their work, so up to 8 tokens they are
one launch (`normed_kernel.py`); more are the ops one after the other, with the same results up to rounding.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from katydid_kernels.gemm.plan import PlacedPairs
from katydid_kernels.quantize_rows import add_rms_norm_quantize
from katydid_kernels.rms_norm import add_rms_norm
from katydid_kernels.router.op import fits_copy_engine, router
from katydid_kernels.router.weight import RouterWeight

__all__ = ["RoutedRows", "add_rms_norm_route"]

MOST_TOKENS = 8
_E4M3 = torch.float8_e4m3fn


class RoutedRows(NamedTuple):
    """total and y ``[T, hidden]`` in the dtype of x; q e4m3 ``[T, hidden]`` and q_scale fp32 ``[T]``, or the one given,
    both None unless asked for; weights fp32 and ids int32 ``[T, top_k]`` as `router` returns them."""

    total: Tensor
    y: Tensor
    q: Tensor | None
    q_scale: Tensor | None
    weights: Tensor
    ids: Tensor


def add_rms_norm_route(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: RouterWeight,
    *,
    top_k: int,
    scoring: Literal["sigmoid", "softmax"],
    selection_bias: Tensor | None = None,
    renormalise: bool = True,
    scale: float = 1.0,
    shared: bool = False,
    fp8: bool = False,
    fp8_scale: Tensor | None = None,
    placed: PlacedPairs | None = None,
) -> RoutedRows:
    """Adds, normalises, quantises and routes.

    Args:
        x, residual: ``[T, hidden]`` of one dtype, rows contiguous; bf16 for the single launch.
        norm_weight: ``[hidden]``.
        eps: of the norm.
        fp8: make q too, with one scale a token, or with `fp8_scale`, fp32 of one element.

    The other arguments, and what it raises, as `router`. Raises ValueError for an x that is not residual's shape.
    """
    if x.shape != residual.shape:
        raise ValueError(f"x and residual must have one shape, got {list(x.shape)} and {list(residual.shape)}")
    hopper = weight.hopper
    if hopper is None or not 1 <= len(x) <= MOST_TOKENS or not _one_launch(x, residual):
        q: Tensor | None = None
        q_scale: Tensor | None = None
        if fp8:
            y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            q, q_scale, total = add_rms_norm_quantize(x, residual, norm_weight, eps, scale=fp8_scale, plain=y)
        else:
            y, total = add_rms_norm(x, residual, norm_weight, eps)
        weights, ids = router(
            y,
            weight,
            top_k=top_k,
            scoring=scoring,
            selection_bias=selection_bias,
            renormalise=renormalise,
            scale=scale,
            shared=shared,
            placed=placed,
        )
        return RoutedRows(total, y, q, q_scale, weights, ids)
    from katydid_kernels.router.launch import Choice, launch_normed

    tokens, hidden = x.shape
    experts = weight.weight.shape[0]
    total, y = (torch.empty(tokens, hidden, dtype=x.dtype, device=x.device) for _ in range(2))
    q = torch.empty(tokens, hidden, dtype=_E4M3, device=x.device) if fp8 else None
    q_scale = torch.empty(tokens, device=x.device) if fp8 and fp8_scale is None else fp8_scale
    weights = torch.empty(tokens, top_k + shared, device=x.device)
    ids = torch.empty(tokens, top_k + shared, dtype=torch.int32, device=x.device)
    choice = Choice(top_k, scoring, selection_bias, renormalise, scale, weights, ids, shared)
    launch_normed(
        x, residual, norm_weight, eps, total, y, q, fp8_scale, q_scale, hopper, experts, choice
    )  # fmt: skip
    if placed is not None:
        placed.place(ids)
    return RoutedRows(total, y, q, q_scale if fp8 else None, weights, ids)


def _one_launch(x: Tensor, residual: Tensor) -> bool:
    return fits_copy_engine(x) and fits_copy_engine(residual)
