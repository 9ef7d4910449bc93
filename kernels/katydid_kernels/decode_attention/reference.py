"""Decode attention in plain torch: prefill's reference with the same number of new tokens in every row."""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_kernels.prefill_attention.reference import prefill_attention_reference

__all__ = ["decode_attention_reference"]


def decode_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attend `q[batch, q_len, heads, head_dim]` to the paged context; see `decode_attention` for the shapes.

    Returns output and log-sum-exp in `dtype`, the dtype of all arithmetic.
    """
    batch, q_len, heads, head_dim = q.shape
    out, lse = prefill_attention_reference(
        q.reshape(batch * q_len, heads, head_dim),
        k_pages,
        v_pages,
        block_table,
        context_lens,
        torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32, device=q.device),
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        dtype=dtype,
    )
    return out.reshape(q.shape), lse.reshape(batch, q_len, heads)
