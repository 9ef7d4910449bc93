"""Launches the decode kernels: the scratch they share, and the shapes chosen for a problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from katydid_kernels.decode_attention.hopper_kernel import decode_hopper_kernel
from katydid_kernels.decode_attention.split_kernel import decode_split_kernel
from katydid_kernels.decode_attention.wide_kernel import decode_wide_kernel
from katydid_kernels.decode_plan import PIECE_COST
from katydid_kernels.prefill_attention.launch import key_descriptor

__all__ = ["DecodeProblem", "DecodeScratch", "decode_ctas", "launch_hopper", "launch_split"]


# Two CTAs of 256 threads with 128 registers fill an SM's registers, three stages of 32 KB each its shared memory.
CTAS_PER_SM = 2
STAGE_BYTES = 32768
REGISTERS = 128
# Query rows of a kv head, at least and at most, with which the wide kernel is the faster one (head_dim up to 128).
WIDE_ROWS = (17, 64)


@dataclass(frozen=True)
class DecodeScratch:
    """Partial results of one stream's decode calls, two slots a CTA, and arrival counters, zero between calls.

    Calls that may run at the same time need a scratch each.
    """

    partial: Tensor
    stats: Tensor
    counters: Tensor

    @staticmethod
    def allocate(ctas: int, q_len: int, group: int, head_dim: int, device: torch.device) -> DecodeScratch:
        """Scratch for plans of `ctas` CTAs and up to `q_len` new tokens of `group` query heads per kv head."""
        rows = padded_rows(q_len, group, 16 if q_len * group < WIDE_ROWS[0] else WIDE_ROWS[1])
        return DecodeScratch(
            torch.empty(2 * ctas * rows * head_dim, device=device),
            torch.empty(2 * ctas * 2 * rows, device=device),
            torch.zeros(4 * ctas, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class DecodeProblem:
    """The tensors and scalars of one decode call, checked; shapes as in `decode_attention`."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    context_lens: Tensor
    out: Tensor
    lse: Tensor
    scale: float
    soft_cap: float | None = None
    window: int | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    out_scale: Tensor | None = None


def decode_ctas(device: torch.device) -> int:
    """CTAs that a plan for this device should deal to."""
    return CTAS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def padded_rows(q_len: int, group: int, least: int) -> int:
    """Query rows of one kv head, padded to a size the tensor cores take."""
    return max(least, int(triton.next_power_of_2(q_len * group)))


def launch_hopper(
    problem: DecodeProblem,
    plan: Tensor,
    scratch: DecodeScratch,
    *,
    overlap: bool = False,
    piece_cost: int = PIECE_COST,
) -> None:
    """Run the Gluon kernel that suits the number of query rows; `overlap` as in `decode_attention`."""
    q, k_pages, v_pages = problem.q, problem.k_pages, problem.v_pages
    batch, q_len, heads, head_dim = q.shape
    num_pages, kv_heads = k_pages.shape[:2]
    group = heads // kv_heads
    bits = 8 * k_pages.element_size()
    page_bytes = 16 * head_dim * bits
    wide = head_dim <= 128 and WIDE_ROWS[0] <= q_len * group <= WIDE_ROWS[1]
    rows = WIDE_ROWS[1] if wide else padded_rows(q_len, group, 8)
    needed = 2 * len(plan) * rows
    if scratch.partial.numel() < needed * head_dim or scratch.counters.numel() < 4 * len(plan):
        raise ValueError(f"scratch must hold {needed} rows of {head_dim} and {4 * len(plan)} counters")

    box = min(head_dim, 1024 // bits)
    # An fp8 row of V is 64 bytes: two of them, of an even and an odd head_dim, make one that TMA moves at full rate.
    paired = bits == 8 and head_dim >= 128
    v_rows, v_width = (head_dim // 2, 128) if paired else (head_dim, 64)
    v_layout = gl.NVMMASharedLayout(v_width * bits // 8, bits, 2)
    v_shape = [num_pages * kv_heads * v_rows, v_width]
    v_desc = TensorDescriptor(v_pages, v_shape, [v_width, 1], [v_rows, v_width], v_layout)
    pointers = (
        problem.block_table,
        problem.context_lens,
        plan,
        scratch.partial,
        scratch.stats,
        scratch.counters,
        problem.out,
        problem.out_scale,
        problem.lse,
    )
    sizes = (
        batch,
        kv_heads,
        problem.scale,
        problem.soft_cap or 0.0,
        problem.window or 0,
        piece_cost,
        problem.block_table.stride(0),
    )
    options = {
        "HAS_Q_SCALE": problem.q_scale is not None,
        "HAS_KV_SCALE": problem.k_scale is not None,
        "PER_HEAD": int(problem.k_scale is not None and problem.k_scale.numel() > 1),
        "SOFT_CAP": problem.soft_cap is not None,
        "Q_LEN": q_len,
        "GROUP": group,
        "D": head_dim,
        "BOX": box,
        "PAIRED": paired,
        "num_warps": 4,
        "launch_pdl": overlap,
    }
    if wide:
        k_desc = key_descriptor(k_pages, permuted=bits == 8)
        pages = min(2, STAGE_BYTES // page_bytes)
        decode_wide_kernel[(len(plan),)](
            q,
            problem.q_scale,
            k_desc,
            v_desc,
            problem.k_scale,
            problem.v_scale,
            *pointers,
            *sizes,
            **options,
            WINDOW=problem.window is not None,
            PAGES=pages,
            STAGES=min(5, 3 * STAGE_BYTES // (pages * page_bytes)),
            UNROLL=2,
            PERMUTE=bits == 8,
            maxnreg=REGISTERS,
        )
        return
    decode_hopper_kernel[(len(plan),)](
        q,
        problem.q_scale,
        key_descriptor(k_pages, permuted=False),
        v_desc,
        problem.k_scale,
        problem.v_scale,
        *pointers,
        *sizes,
        **options,
        ROWS=rows,
        PAGES=max(1, min(STAGE_BYTES // page_bytes, 64 // rows)),
        STAGES=3 if page_bytes <= STAGE_BYTES else 2,
        UNROLL=max(1, min(8, 8192 // (rows * head_dim))),
        maxnreg=REGISTERS if rows * head_dim <= 8192 else 255,
    )


def launch_split(
    problem: DecodeProblem,
    plan: Tensor,
    scratch: DecodeScratch,
    *,
    stages: int = 4,
    piece_cost: int = PIECE_COST,
) -> None:
    """Run the plain-Triton kernel, the fallback and oracle of the Gluon one."""
    q, k_pages = problem.q, problem.k_pages
    batch, q_len, heads, head_dim = q.shape
    kv_heads = k_pages.shape[1]
    rows = padded_rows(q_len, heads // kv_heads, 16)
    decode_split_kernel[(len(plan),)](
        q,
        problem.q_scale,
        k_pages,
        problem.v_pages,
        problem.k_scale,
        problem.v_scale,
        problem.block_table,
        problem.context_lens,
        plan,
        scratch.partial,
        scratch.stats,
        scratch.counters,
        problem.out,
        problem.lse,
        batch,
        kv_heads,
        problem.scale,
        problem.soft_cap or 0.0,
        problem.window or 0,
        piece_cost,
        problem.block_table.stride(0),
        k_pages.stride(0),
        HAS_Q_SCALE=problem.q_scale is not None,
        PER_HEAD=int(problem.k_scale is not None and problem.k_scale.numel() > 1),
        HAS_KV_SCALE=problem.k_scale is not None,
        SOFT_CAP=problem.soft_cap is not None,
        Q_LEN=q_len,
        GROUP=heads // kv_heads,
        ROWS=rows,
        HEAD_DIM=head_dim,
        COMBINE=max(1, min(8, 8192 // (rows * head_dim))),
        STAGES=stages,
        num_warps=4,
    )
