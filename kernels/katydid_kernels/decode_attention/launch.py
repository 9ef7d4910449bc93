"""Launches the decode kernels: scratch memory that lives as long as its owner, and the choice of shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from katydid_kernels.decode_attention.hopper_kernel import decode_hopper_kernel
from katydid_kernels.decode_attention.split_kernel import decode_split_kernel
from katydid_kernels.decode_plan import PIECE_COST

__all__ = ["DecodeScratch", "launch_hopper", "launch_split", "padded_rows"]


@dataclass(frozen=True)
class DecodeScratch:
    """Partial results and arrival counters of one stream: two slots a CTA, one counter a (row, kv head), zero between calls."""

    partial: Tensor
    stats: Tensor
    counters: Tensor

    @staticmethod
    def allocate(ctas: int, items: int, rows: int, head_dim: int, device: torch.device) -> DecodeScratch:
        """Scratch for `ctas` CTAs, `items` = batch * kv_heads and `rows` padded query rows per kv head."""
        return DecodeScratch(
            torch.empty(2 * ctas, rows, head_dim, device=device),
            torch.empty(2 * ctas, 2, rows, device=device),
            torch.zeros(items, dtype=torch.int32, device=device),
        )


def padded_rows(q_len: int, group: int) -> int:
    """Query rows of one kv head, padded to a size the tensor cores take."""
    return max(16, triton.next_power_of_2(q_len * group))


def launch_split(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    plan: Tensor,
    scratch: DecodeScratch,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    step: int = 64,
    stages: int = 4,
    warps: int = 4,
    piece_cost: int = PIECE_COST,
) -> None:
    batch, q_len, heads, head_dim = q.shape
    kv_heads = k_pages.shape[1]
    rows = padded_rows(q_len, heads // kv_heads)
    decode_split_kernel[(len(plan),)](
        q,
        q_scale,
        k_pages,
        v_pages,
        k_scale,
        v_scale,
        block_table,
        context_lens,
        plan,
        scratch.partial,
        scratch.stats,
        scratch.counters,
        out,
        lse,
        batch,
        kv_heads,
        scale,
        soft_cap or 0.0,
        window or 0,
        piece_cost,
        block_table.stride(0),
        k_pages.stride(0),
        HAS_Q_SCALE=q_scale is not None,
        K_PER_HEAD=int(k_scale is not None and k_scale.numel() > 1),
        HAS_KV_SCALE=k_scale is not None,
        SOFT_CAP=soft_cap is not None,
        Q_LEN=q_len,
        GROUP=heads // kv_heads,
        ROWS=rows,
        HEAD_DIM=head_dim,
        STEP=step,
        COMBINE=max(1, min(8, 8192 // (rows * head_dim))),
        STAGES=stages,
        num_warps=warps,
    )


def launch_hopper(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    plan: Tensor,
    scratch: DecodeScratch,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    pages: int = 2,
    stages: int = 3,
    combine: int = 4,
    registers: int = 168,
    piece_cost: int = PIECE_COST,
) -> None:
    batch, q_len, heads, head_dim = q.shape
    num_pages, kv_heads = k_pages.shape[:2]
    bits = 8 * k_pages.element_size()
    box = min(head_dim, 1024 // bits)
    k_layout = gl.NVMMASharedLayout(box * bits // 8, bits, 2)
    v_layout = gl.NVMMASharedLayout(64 * bits // 8, bits, 2)
    decode_hopper_kernel[(len(plan),)](
        q,
        q_scale,
        TensorDescriptor(k_pages, [num_pages * kv_heads * 64, head_dim], [head_dim, 1], [64, box], k_layout),
        TensorDescriptor(v_pages, [num_pages * kv_heads * head_dim, 64], [64, 1], [head_dim, 64], v_layout),
        k_scale,
        v_scale,
        block_table,
        context_lens,
        plan,
        scratch.partial,
        scratch.stats,
        scratch.counters,
        out,
        lse,
        batch,
        kv_heads,
        scale,
        soft_cap or 0.0,
        window or 0,
        piece_cost,
        block_table.stride(0),
        HAS_Q_SCALE=q_scale is not None,
        HAS_KV_SCALE=k_scale is not None,
        K_PER_HEAD=int(k_scale is not None and k_scale.numel() > 1),
        SOFT_CAP=soft_cap is not None,
        Q_LEN=q_len,
        GROUP=heads // kv_heads,
        ROWS=padded_rows(q_len, heads // kv_heads),
        D=head_dim,
        DB=box,
        PAGES=pages,
        STAGES=stages,
        COMBINE=combine,
        num_warps=4,
        maxnreg=registers,
    )
