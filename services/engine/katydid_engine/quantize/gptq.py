"""Rounds a weight so that what it is multiplied with hides the error: GPTQ, for a stack of matrices at once.

Of all codes under given scales, those are wanted whose product with the calibration rows x is nearest to the weight's:
min |(W - Q) X|^2 = min tr (W - Q) H (W - Q)^T with H = X X^T. Column by column, each rounding error is spread over the
columns that are not rounded yet, in the proportion that H says (Frantar et al., "GPTQ", 2022, equations 2 and 3, with
the triangular form of its section 3.3). Columns with the largest rows go first (act-order); groups keep their
consecutive columns and the scales that were chosen before, so that any reader of the format understands the result.
"""

from __future__ import annotations

import torch
from katydid_kernels import round_columns
from torch import Tensor

from katydid_engine.quantization import GROUP

__all__ = ["E4M3", "INT4", "follow_drift", "gptq", "output_error", "refit_scales"]

_BLOCK = 128


# What holds the values that a weight over its scale may take: -8 to 7, or all of e4m3.
INT4, E4M3 = torch.int8, torch.float8_e4m3fn


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scales: Tensor,
    *,
    damping: float = 0.01,
    act_order: bool = True,
    grid: torch.dtype = INT4,
) -> Tensor:
    """Codes ``[B, N, K]`` of the grid.

    Args:
        weight: fp32 ``[B, N, K]``.
        hessian: fp32 ``[B, K, K]``, sums of x x^T over the calibration rows; columns that no row touches may be zero.
        scales: ``[B, N, ceil(K / 128)]`` of groups of 128 columns, of either sign; or ``[B, N, 1]`` of whole rows.
        damping: what is added to the diagonal, as a share of its mean.
        grid: INT4 or E4M3.
    """
    hessian, order = _prepared(hessian, damping, act_order)
    columns = weight.shape[-1]
    work = weight.gather(2, order[:, None].expand_as(weight))
    repeats = columns if scales.shape[-1] == 1 else GROUP
    column_scales = scales.float().repeat_interleave(repeats, -1)[..., :columns]
    column_scales = column_scales.gather(2, order[:, None].expand_as(weight))
    spread = _inverse_factor(hessian)
    codes = torch.empty_like(work)
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        part = slice(begin, end)
        codes[..., part], errors = round_columns(work[..., part], column_scales[..., part], spread[:, part, part], grid)
        work[..., end:] -= errors @ spread[:, part, end:]
    return torch.empty_like(codes).scatter_(2, order[:, None].expand_as(codes), codes).to(grid)


def refit_scales(weight: Tensor, hessian: Tensor, codes: Tensor, *, damping: float = 0.01) -> Tensor:
    """The bf16 scales ``[B, N, groups]`` under which these codes give the least ``tr (W - Q) H (W - Q)^T``.

    A row's scales s solve a linear system of its groups' size: sum over g' of (c_g H c_g'^T) s_g' = c_g H w^T, where
    c_g are the row's codes in group g, zero elsewhere. A group whose codes are all zero gets scale 1.
    """
    hessian, _ = _prepared(hessian, damping, act_order=False)
    batch, rows, columns = weight.shape
    groups = -(-columns // GROUP)
    wide = codes.float()
    target = weight @ hessian
    normal = weight.new_empty(batch, rows, groups, groups)
    right = weight.new_empty(batch, rows, groups)
    for group in range(groups):
        part = slice(group * GROUP, (group + 1) * GROUP)
        normal[:, :, group] = _sum_groups((wide[..., part] @ hessian[:, part]) * wide)
        right[:, :, group] = (target[..., part] * wide[..., part]).sum(-1)
    empty = normal.diagonal(dim1=-2, dim2=-1) <= 0
    normal.diagonal(dim1=-2, dim2=-1)[empty] = 1.0
    right[empty] = 1.0
    solved: Tensor = torch.linalg.solve(normal, right)
    return solved.to(torch.bfloat16)


def follow_drift(weight: Tensor, hessian: Tensor, drift: Tensor, *, damping: float = 0.01) -> Tensor:
    """The weight whose product with the rows x' that the quantised model makes is nearest to W x of the original model:
    ``W + W D (H + damping)^-1`` with ``D = sum (x - x') x'^T``: least squares, damped towards W.

    GPTQ of it minimises |W X - Q X'|^2, the error of the layer's output including what earlier layers left
    (the aim of Li et al., "GPTAQ", 2025).

    Args:
        weight: fp32 ``[B, N, K]``.
        hessian: sums of x' x'^T.
        drift: fp32 ``[B, K, K]``.
    """
    hessian, _ = _prepared(hessian, damping, act_order=False)
    factor = _inverse_factor(hessian)
    return weight + weight @ drift @ factor.mT @ factor


def output_error(weight: Tensor, hessian: Tensor, rounded: Tensor) -> Tensor:
    """Relative error of the product, ``sqrt(tr (W - Q) H (W - Q)^T / tr W H W^T)``, ``[B]``."""
    difference = weight - rounded
    wrong = ((difference @ hessian) * difference).sum((1, 2))
    whole = ((weight @ hessian) * weight).sum((1, 2))
    return (wrong / whole.clamp(min=1e-30)).clamp(min=0).sqrt()


def _prepared(hessian: Tensor, damping: float, act_order: bool) -> tuple[Tensor, Tensor]:
    """The damped matrix, and the order ``[B, K]`` of its columns, in which it is returned."""
    diagonal = hessian.diagonal(dim1=1, dim2=2)
    order = torch.arange(hessian.shape[-1], device=hessian.device).expand_as(diagonal)
    if act_order:
        order = diagonal.argsort(dim=1, descending=True, stable=True)
    mean = diagonal.mean(1, keepdim=True)
    added = torch.where(mean > 0, damping * mean, torch.ones_like(mean)).expand_as(diagonal)
    damped = hessian + torch.diag_embed(added)
    if act_order:
        damped = damped.gather(1, order[:, :, None].expand_as(damped)).gather(2, order[:, None].expand_as(damped))
    return damped, order


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Upper triangular U with ``U^T U = H^-1``: row k of it says how the error of column k is spread.

    Of H with rows and columns reversed, the Cholesky factor reversed is an upper triangular R with ``R R^T = H``, and U
    is its inverse: one factorisation where ``cholesky(inverse(H))`` takes three.
    """
    # One at a time: solvers of batches are made for small matrices.
    lower = torch.stack([torch.linalg.cholesky(one) for one in hessian.flip(1, 2)])
    identity = torch.eye(hessian.shape[-1], dtype=hessian.dtype, device=hessian.device)
    return torch.stack([torch.linalg.solve_triangular(one, identity, upper=True) for one in lower.flip(1, 2)])


def _sum_groups(x: Tensor) -> Tensor:
    """``[B, N, K] -> [B, N, groups]``."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP))
    return padded.view(*x.shape[:-1], -1, GROUP).sum(-1)
