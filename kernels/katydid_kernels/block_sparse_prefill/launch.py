"""Launches the block-sparse kernels: tensor maps and tile shapes for a problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from katydid_kernels.block_sparse_prefill.combine_kernel import ROWS, combine_kernel
from katydid_kernels.block_sparse_prefill.hopper_kernel import sparse_hopper_kernel
from katydid_kernels.block_sparse_prefill.tile_kernel import sparse_tile_kernel
from katydid_kernels.prefill_attention.launch import GROUP_BY_GROUP_TOKENS, PING_PONG, STAGES, key_descriptor
from katydid_kernels.stem_select.plan import SparsePlan

__all__ = ["SparseProblem", "launch_hopper", "launch_tile"]


@dataclass(frozen=True)
class SparseProblem:
    """The tensors and scalars of one call, checked; shapes as in `block_sparse_prefill`."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    plan: SparsePlan
    blocks: Tensor
    out: Tensor
    scale: float
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def launch_hopper(problem: SparseProblem) -> None:
    """Run the Gluon kernel; it starts before the preceding kernel ends, as a rule the selection, and waits for it.

    What it left in pieces is combined in a launch of its own.
    """
    q, k_pages, plan = problem.q, problem.k_pages, problem.plan
    tokens, heads, head_dim = q.shape
    num_pages, kv_heads = k_pages.shape[:2]
    bits = 8 * q.element_size()
    box = min(head_dim, 1024 // bits)
    q_layout = gl.NVMMASharedLayout(box * bits // 8, bits, 2)
    v_layout = gl.NVMMASharedLayout(64 * bits // 8, bits, 2)
    partials = torch.empty(plan.partials, heads, 128, head_dim, device=q.device)
    sums = torch.empty(plan.partials, heads, 128, device=q.device)
    ctas = torch.cuda.get_device_properties(q.device).multi_processor_count
    sparse_hopper_kernel[(ctas,)](
        TensorDescriptor(q, [tokens, heads * head_dim], [heads * head_dim, 1], [64, box], q_layout),
        key_descriptor(k_pages, permuted=bits == 8),
        TensorDescriptor(problem.v_pages, [num_pages * kv_heads * head_dim, 64], [64, 1], [head_dim, 64], v_layout),
        plan.pieces,
        problem.blocks,
        problem.block_table,
        problem.out,
        partials,
        sums,
        problem.q_scale,
        problem.k_scale,
        problem.v_scale,
        len(plan.pieces),
        heads,
        kv_heads,
        heads if tokens < GROUP_BY_GROUP_TOKENS else heads // kv_heads,
        problem.block_table.stride(0),
        problem.blocks.shape[2],
        problem.scale,
        HAS_Q_SCALE=problem.q_scale is not None,
        HAS_KV_SCALE=problem.k_scale is not None,
        PER_HEAD=int(problem.k_scale is not None and problem.k_scale.numel() > 1),
        STAGES=STAGES[bits],
        Q_STAGES=2 if bits == 8 else 1,  # of 16 bits there is no room for the next tile's queries
        D=head_dim,
        PERMUTE=bits == 8,
        PING_PONG=bits in PING_PONG,
        REGISTERS=240,
        EARLY=True,
        num_warps=4,
        launch_pdl=True,
    )
    if plan.partials:
        combine_kernel[(len(plan.cuts), heads, 128 // ROWS)](
            partials, sums, plan.cuts, problem.out, heads, D=head_dim, ROWS=ROWS, EARLY=True, num_warps=4,
            launch_pdl=True,
        )  # fmt: skip


def launch_tile(problem: SparseProblem) -> None:
    """Run the plain-Triton kernel, the fallback and oracle of the Gluon one."""
    heads, head_dim = problem.q.shape[1:]
    sparse_tile_kernel[(problem.plan.tiles, heads)](
        problem.q,
        problem.k_pages,
        problem.v_pages,
        problem.plan.in_order,
        problem.blocks,
        problem.block_table,
        problem.out,
        problem.q_scale,
        problem.k_scale,
        problem.v_scale,
        heads,
        problem.k_pages.shape[1],
        problem.block_table.stride(0),
        problem.blocks.shape[2],
        problem.scale,
        PER_HEAD=int(problem.k_scale is not None and problem.k_scale.numel() > 1),
        D=head_dim,
        num_warps=8,
    )
