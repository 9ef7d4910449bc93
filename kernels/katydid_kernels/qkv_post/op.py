"""Everything between the QKV projection and attention, in one pass: split, norm, rotate, write K and V into pages.

Per token and head: q and k are RMS-normalised over head_dim (before RoPE as in Hy3 and Qwen3, after it, or not at all),
rotated by position, perhaps by a Hadamard matrix too (it spreads outliers before quantising; scores do not change, for
q and k turn alike), and K and V are stored at the token's slot. Bound by memory: each element is read and written once.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from katydid_kernels.qkv_post.kernel import qkv_post_kernel
from katydid_kernels.qkv_post.reference import QkNorm, qkv_post_fp8_reference, qkv_post_reference

__all__ = ["qkv_post", "qkv_post_fp8"]

_E4M3 = torch.float8_e4m3fn
FEW_TOKENS = 64


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
    k_mean: Tensor | None = None,
    hadamard: bool = False,
    overlap: bool = False,
) -> Tensor:
    """Returns q ``[T, q_heads, head_dim]`` ready for attention, in the dtype of qkv; writes K and V.

    Args:
        qkv: ``[T, (q_heads + 2 * kv_heads) * head_dim]``: all q heads, then all k heads, then all v heads. head_dim is
            a power of two.
        table: fp32 ``[positions, head_dim]`` from ``rope_table``.
        positions: int32 ``[T]``.
        slot_mapping: int32 ``[T]``: ``page * 64 + offset``; a token with a negative slot is not stored.
        k_pages: ``[pages, kv_heads, 64, head_dim]``, contiguous, written in place, in its own dtype.
        v_pages: ``[pages, kv_heads, head_dim, 64]``, likewise.
        q_norm_weight: ``[head_dim]``; given with ``k_norm_weight`` unless ``qk_norm`` is "none".
        qk_norm: where the per-head norm stands.
        eps: of the norm.
        k_scale: fp32 ``[1]`` or ``[kv_heads]``; ``k / k_scale`` is stored, saturated to the range of an fp8 page.
        v_scale: likewise for V.
        k_mean: fp32 ``[kv_heads, head_dim]``, contiguous: taken off every key of its head before it is scaled. Softmax
            does not see it: to all scores of a query it adds the same (smooth K; Zhang et al., "SageAttention", 2024).
        hadamard: multiply q and k by the orthonormal Hadamard matrix of head_dim, last.
        overlap: let the kernel start before the preceding one ends (programmatic dependent launch). Then all but qkv
            must be older than the preceding kernel.

    Raises ValueError for norm weights without a norm, a norm without them, and shapes that do not fit.
    """
    _check(qkv, table, k_pages, v_pages, q_norm_weight, k_norm_weight, qk_norm, k_mean)
    if not _has_kernel(qkv):
        return qkv_post_reference(
            qkv, table, positions, slot_mapping, k_pages, v_pages, q_norm_weight=q_norm_weight,
            k_norm_weight=k_norm_weight, qk_norm=qk_norm, eps=eps, k_scale=k_scale, v_scale=v_scale, k_mean=k_mean,
            hadamard=hadamard,
        )  # fmt: skip
    q = _new_q(qkv, k_pages, qkv.dtype)
    _launch(
        qkv, table, positions, slot_mapping, k_pages, v_pages, q, None, None, q_norm_weight, k_norm_weight, qk_norm,
        eps, k_scale, v_scale, k_mean, hadamard, overlap,
    )  # fmt: skip
    return q


def qkv_post_fp8(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    q_scale: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    qk_norm: QkNorm = "none",
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_mean: Tensor | None = None,
    hadamard: bool = False,
    overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    """`qkv_post` with q in e4m3: returns q and what to multiply it by, fp32 ``[T, q_heads]``, as attention takes them.

    Args:
        q_scale: fp32 of one element to quantise every q with, or None for ``max |q| / 448`` per token and head.

    The other arguments, and what it raises, as `qkv_post`.
    """
    _check(qkv, table, k_pages, v_pages, q_norm_weight, k_norm_weight, qk_norm, k_mean)
    if not _has_kernel(qkv):
        q = qkv_post_reference(
            qkv, table, positions, slot_mapping, k_pages, v_pages, q_norm_weight=q_norm_weight,
            k_norm_weight=k_norm_weight, qk_norm=qk_norm, eps=eps, k_scale=k_scale, v_scale=v_scale, k_mean=k_mean,
            hadamard=hadamard,
        )  # fmt: skip
        return qkv_post_fp8_reference(q, q_scale)
    q = _new_q(qkv, k_pages, _E4M3)
    scales = torch.empty(q.shape[:2], device=qkv.device)
    _launch(
        qkv, table, positions, slot_mapping, k_pages, v_pages, q, q_scale, scales, q_norm_weight, k_norm_weight,
        qk_norm, eps, k_scale, v_scale, k_mean, hadamard, overlap,
    )  # fmt: skip
    return q, scales


def _has_kernel(qkv: Tensor) -> bool:
    return qkv.is_cuda


def _new_q(qkv: Tensor, k_pages: Tensor, dtype: torch.dtype) -> Tensor:
    _, kv_heads, _, head_dim = k_pages.shape
    return torch.empty(
        qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads, head_dim, dtype=dtype, device=qkv.device
    )  # fmt: skip


def _check(
    qkv: Tensor,
    table: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    qk_norm: QkNorm,
    k_mean: Tensor | None,
) -> None:
    if (qk_norm == "none") != (q_norm_weight is None) or (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError(f"qk_norm={qk_norm!r}: expected both norm weights exactly when it is not 'none'")
    pages, kv_heads, page_size, head_dim = k_pages.shape
    if v_pages.shape != (pages, kv_heads, head_dim, page_size) or v_pages.dtype != k_pages.dtype:
        raise ValueError(f"v_pages must be k_pages' shape {list(k_pages.shape)} with the last two swapped, and dtype")
    if head_dim < 4 or head_dim & (head_dim - 1) or table.shape[1] != head_dim:
        raise ValueError(f"head_dim must be a power of two and the table's width {table.shape[1]}, got {head_dim}")
    if k_mean is not None and (k_mean.shape != (kv_heads, head_dim) or k_mean.dtype != torch.float32):
        raise ValueError(
            f"k_mean must be fp32 [{kv_heads}, {head_dim}], got {str(k_mean.dtype)[6:]} {list(k_mean.shape)}"
        )
    if qkv.shape[1] % head_dim or qkv.shape[1] <= 2 * kv_heads * head_dim:
        raise ValueError(
            f"qkv must have rows of q, k and v heads of {head_dim}, with {kv_heads} k and v heads, got {qkv.shape[1]}"
        )


def _launch(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q: Tensor,
    q_scale: Tensor | None,
    scales: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    qk_norm: QkNorm,
    eps: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_mean: Tensor | None,
    hadamard: bool,
    overlap: bool,
) -> None:
    tokens, q_heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1], k_pages.shape[2]
    if tokens == 0:
        return
    # Few tokens are spread over many programs; of many, a program takes a token whole, with few threads, so that what
    # depends on the position alone is computed once and an SM has many tokens on their way. One warp hands the scales
    # of a head on without a barrier, and half the heads at a time leave room for twice as many tokens; wider pages are
    # bound by memory alone and want the wider stores.
    few, narrow = tokens <= FEW_TOKENS, k_pages.element_size() == 1
    elements, warps, columns = (2048, 4, 16) if few else (512, 1, 32) if narrow else (1024, 2, head_dim)
    rows = min(max(1, elements // head_dim), triton.next_power_of_2(q_heads))
    groups = triton.cdiv(q_heads, rows) + triton.cdiv(kv_heads, rows)
    loop = 1 if few else groups
    v_tokens, v_columns = 16 if few else 32, min(columns, head_dim)
    programs = triton.cdiv(tokens, v_tokens) * kv_heads * (head_dim // v_columns) + tokens * triton.cdiv(groups, loop)
    options = {"launch_pdl": True} if overlap else {}
    qkv_post_kernel[(programs,)](
        qkv, qkv.stride(0), table, positions, slot_mapping, q_norm_weight, k_norm_weight, q, q_scale, scales,
        k_pages, v_pages, k_scale, int(k_scale is not None and k_scale.numel() > 1),
        v_scale, int(v_scale is not None and v_scale.numel() > 1), k_mean, tokens, eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, D=head_dim, PAGE=page_size, NORM=qk_norm, HADAMARD=hadamard,
        Q_SCALE="none" if scales is None else ("dynamic" if q_scale is None else "static"),
        ROWS=rows, LOOP=loop, V_TOKENS=v_tokens, V_COLUMNS=v_columns, EARLY=overlap, num_warps=warps, **options,
    )  # fmt: skip
