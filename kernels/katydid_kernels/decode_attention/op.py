"""The public decode call: checks what the caller sends and picks the implementation the device can run."""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_kernels.decode_attention.reference import decode_attention_reference
from katydid_kernels.prefill_attention.op import check_pages

__all__ = ["MAX_Q_LEN", "decode_attention"]

MAX_Q_LEN = 8


def decode_attention(
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
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the newest `q_len` tokens of every request to its paged context.

    Args:
        q: `[batch, q_len, heads, head_dim]`, q_len 1..8; fp32, fp16, bf16, or e4m3 when the pages are e4m3.
        k_pages: `[pages, kv_heads, 64, head_dim]`, v_pages: `[pages, kv_heads, head_dim, 64]`, one dtype.
        block_table: int32 `[batch, max_pages]`; entries past a row's last page are never read.
        context_lens: int32 `[batch]`, tokens in the row's pages **with** the new ones; slots past it may hold anything.
        scale: factor on q.k, by default `head_dim ** -0.5`.
        soft_cap: when given, scores become `soft_cap * tanh(score / soft_cap)`.
        window: when given, a token sees itself and the `window - 1` tokens before it.
        q_scale: fp32 `[batch, q_len, heads]`; k_scale, v_scale: fp32 `[1]` or `[kv_heads]`; multiply the stored values.
        out: where to write, of q's shape, bf16 for e4m3 queries and q's dtype otherwise.

    Returns the output and the natural-log sum of exponentials, fp32 `[batch, q_len, heads]`.  A token with nothing to
    see (a row of length zero) gives zeros and -inf.

    Raises ValueError naming the argument that does not fit.
    """
    if q.ndim != 4 or not 1 <= q.shape[1] <= MAX_Q_LEN:
        raise ValueError(f"q must be [batch, q_len, heads, head_dim] with q_len 1..{MAX_Q_LEN}, got {list(q.shape)}")
    check_pages(q, k_pages, v_pages, block_table, context_lens)
    if len(q) != len(context_lens):
        raise ValueError(f"q must have context_lens' batch {len(context_lens)}, got {len(q)}")
    result, lse = decode_attention_reference(
        q,
        k_pages,
        v_pages,
        block_table,
        context_lens,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if out is None:
        return result.to(torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype), lse
    return out.copy_(result), lse
