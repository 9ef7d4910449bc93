"""Block-sparse attention in plain torch: what the kernels must equal, and what runs on a machine with no GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_kernels.stem_select.budget import BLOCK
from katydid_kernels.stem_select.plan import SparsePlan

__all__ = ["block_sparse_prefill_reference"]

PAGE = 64


def block_sparse_prefill_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    plan: SparsePlan,
    blocks: Tensor,
    *,
    scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gathers a tile's blocks head by head; `dtype` is that of all arithmetic (float64 makes it an oracle)."""
    _tokens, heads, head_dim = q.shape
    group = heads // k_pages.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    within = torch.arange(BLOCK, device=q.device)
    for row, first, end, position, length, count, tile, _ in plan.in_order.tolist():
        token = (blocks[tile, :, :count].long()[:, :, None] * BLOCK + within).flatten(1)
        written = token < length
        page = block_table[row].long()[torch.where(written, token, 0) // PAGE]
        kv_head = (torch.arange(heads, device=q.device) // group)[:, None]
        keys = k_pages[page, kv_head, token % PAGE].to(dtype)
        values = v_pages[page, kv_head, :, token % PAGE].to(dtype).masked_fill(~written[..., None], 0.0)
        queries = q[first:end].to(dtype)
        if q_scale is not None:
            queries = queries * q_scale[first:end].to(dtype)[..., None]
        scores = (queries.transpose(0, 1) * scale) @ keys.transpose(1, 2)
        if k_scale is not None and v_scale is not None:
            factors = (
                s.to(dtype).expand(heads // group).repeat_interleave(group)[:, None, None] for s in (k_scale, v_scale)
            )
            k_factor, v_factor = factors
            scores, values = scores * k_factor, values * v_factor
        at = position + torch.arange(end - first, device=q.device)
        visible = token[:, None, :] <= at[None, :, None]
        weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
        out[first:end] = (weights @ values).transpose(0, 1)
    return out
