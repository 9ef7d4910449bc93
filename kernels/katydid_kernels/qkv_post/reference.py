"""qkv_post in torch, step by step: what it computes, and what runs without a GPU."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from katydid_kernels.rms_norm import rms_norm_reference
from katydid_kernels.rope import rope_reference

__all__ = ["QkNorm", "qkv_post_fp8_reference", "qkv_post_reference"]

QkNorm = Literal["none", "before_rope", "after_rope"]


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
    k_mean: Tensor | None,
    hadamard: bool,
) -> Tensor:
    """`qkv_post` in torch, of its arguments."""
    _, kv_heads, page_size, head_dim = k_pages.shape
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
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
    if hadamard:
        qk = (qk.float() @ _hadamard_matrix(head_dim).to(qk.device)).to(qk.dtype)
    q, k = qk.split([q_heads, kv_heads], dim=1)
    stored = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[stored].long()
    page, offset = slots // page_size, slots % page_size
    kept = k[stored] if k_mean is None else k[stored].float() - k_mean
    k_pages[page, :, offset, :] = _to_page_dtype(kept, k_scale, k_pages.dtype)
    v_pages[page, :, :, offset] = _to_page_dtype(v[stored], v_scale, v_pages.dtype)
    ready: Tensor = q.contiguous()
    return ready


def qkv_post_fp8_reference(q: Tensor, q_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """e4m3 q and its fp32 scales ``[T, q_heads]`` from the q of `qkv_post_reference`."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    wide = q.float()
    scale = (wide.abs().amax(-1) / limit).clamp(min=1e-12) if q_scale is None else q_scale.expand(q.shape[:2])
    quantised = (wide / scale.unsqueeze(-1)).clamp(-limit, limit).to(torch.float8_e4m3fn)
    return quantised, scale.contiguous()


def _hadamard_matrix(size: int) -> Tensor:
    """Sylvester's, orthonormal and symmetric: ``[size, size]``, size a power of two."""
    matrix: Tensor = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def _to_page_dtype(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is not None:
        x = x.float() / scale.unsqueeze(-1)
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        x = x.float().clamp(-limit, limit)
    return x.to(dtype)
