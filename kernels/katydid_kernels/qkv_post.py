"""Everything between the QKV projection and attention, in one pass: split, norm, rotate, write K and V into pages.

Per token and head: q and k are RMS-normalised over head_dim (before RoPE as in Hy3 and Qwen3, after it, or not at all),
rotated by position, and K and V are stored at the token's slot. Bound by memory: each element is read and written once.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from katydid_kernels.rms_norm import rms_norm_reference
from katydid_kernels.rope import rope_reference

__all__ = ["QkNorm", "qkv_post", "qkv_post_reference"]

QkNorm = Literal["none", "before_rope", "after_rope"]


def qkv_post(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    qk_norm: QkNorm = "none",
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Returns q ``[T, q_heads, head_dim]`` ready for attention; writes K and V.

    Args:
        qkv: ``[T, (q_heads + 2 * kv_heads) * head_dim]``: all q heads, then all k heads, then all v heads.
        table: fp32 ``[positions, head_dim]`` from ``rope_table``.
        positions: int32 ``[T]``.
        slot_mapping: int32 ``[T]``: ``page * 64 + offset``; a token with a negative slot is not stored.
        k_pages: ``[pages, kv_heads, 64, head_dim]``, written in place, in its own dtype.
        v_pages: ``[pages, kv_heads, head_dim, 64]``, written in place, in its own dtype.
        q_norm_weight: ``[head_dim]``; given with ``k_norm_weight`` unless ``qk_norm`` is "none".
        qk_norm: where the per-head norm stands.
        eps: of the norm.
        k_scale: fp32 ``[1]`` or ``[kv_heads]``; ``k / k_scale`` is stored, saturated to the range of an fp8 page.
        v_scale: likewise for V.
    """
    if (qk_norm == "none") != (q_norm_weight is None) or (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError(f"qk_norm={qk_norm!r}: expected both norm weights exactly when it is not 'none'")
    return qkv_post_reference(
        qkv,
        table,
        positions,
        slot_mapping,
        k_pages,
        v_pages,
        q_norm_weight=q_norm_weight,
        k_norm_weight=k_norm_weight,
        qk_norm=qk_norm,
        eps=eps,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def qkv_post_reference(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    qk_norm: QkNorm,
    eps: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    _, kv_heads, page_size, head_dim = k_pages.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q_heads = heads.shape[1] - 2 * kv_heads
    qk, v = heads.split([q_heads + kv_heads, kv_heads], dim=1)
    # One weight row per head, so that q and k take the same steps together.
    norm_weight = None
    if q_norm_weight is not None and k_norm_weight is not None:
        norm_weight = torch.cat((q_norm_weight.expand(q_heads, -1), k_norm_weight.expand(kv_heads, -1)))
    if norm_weight is not None and qk_norm == "before_rope":
        qk = rms_norm_reference(qk, norm_weight, eps)
    qk = rope_reference(qk, table, positions)
    if norm_weight is not None and qk_norm == "after_rope":
        qk = rms_norm_reference(qk, norm_weight, eps)
    q, k = qk.split([q_heads, kv_heads], dim=1)
    stored = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[stored].long()
    page, offset = slots // page_size, slots % page_size
    k_pages[page, :, offset, :] = _to_page_dtype(k[stored], k_scale, k_pages.dtype)
    v_pages[page, :, :, offset] = _to_page_dtype(v[stored], v_scale, v_pages.dtype)
    ready: Tensor = q.contiguous()
    return ready


def _to_page_dtype(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is not None:
        x = x.float() / scale.unsqueeze(-1)
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        x = x.float().clamp(-limit, limit)
    return x.to(dtype)
