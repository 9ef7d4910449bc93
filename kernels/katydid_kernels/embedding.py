"""Rows of an embedding of which a rank holds a part: y[t] = weight[ids[t] - first], or zeros where another rank has it.

Adding the ranks' outputs gives the whole embedding. One pass, where indexing with masks takes seven launches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["embedding", "embedding_reference"]


def embedding(ids: Tensor, weight: Tensor, *, first: int = 0, positions: Tensor | None = None) -> Tensor:
    """int32 ``[T]`` -> ``[T, n]`` in the dtype of ``weight``.

    Args:
        ids: of the whole vocabulary; those outside ``first .. first + rows - 1`` give zeros.
        weight: ``[rows, n]``, contiguous.
        positions: int32 ``[T]``; tokens at position 0 give zeros, too.
    """
    if not _has_kernel(weight):
        return embedding_reference(ids, weight, first=first, positions=positions)
    rows, n = weight.shape
    out = torch.empty(len(ids), n, dtype=weight.dtype, device=weight.device)
    if len(ids):
        _embedding_kernel[(len(ids),)](
            ids, positions, weight, out, first, rows, n, BLOCK=triton.next_power_of_2(n), num_warps=4
        )  # fmt: skip
    return out


def _has_kernel(weight: Tensor) -> bool:
    return weight.is_cuda


@triton.jit(do_not_specialize=["first", "rows"])
def _embedding_kernel(ids_ptr, positions_ptr, weight_ptr, out_ptr, first, rows, n, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    row = tl.load(ids_ptr + token) - first
    col = tl.arange(0, BLOCK)
    here = (row >= 0) & (row < rows)
    if positions_ptr is not None:
        here &= tl.load(positions_ptr + token) != 0
    values = tl.load(weight_ptr + row.to(tl.int64) * n + col, mask=here & (col < n), other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * n + col, values, mask=col < n)


def embedding_reference(ids: Tensor, weight: Tensor, *, first: int = 0, positions: Tensor | None = None) -> Tensor:
    local = ids - first
    ours = (local >= 0) & (local < weight.shape[0])
    if positions is not None:
        ours &= positions != 0
    return F.embedding(torch.where(ours, local, 0), weight).masked_fill(~ours.unsqueeze(1), 0.0)
