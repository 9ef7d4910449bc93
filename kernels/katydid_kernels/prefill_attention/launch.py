"""Launches the prefill kernels: tensor maps and tile shapes for a problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from katydid_kernels.prefill_attention.hopper_kernel import prefill_hopper_kernel
from katydid_kernels.prefill_attention.plan import QUERY_TILE
from katydid_kernels.prefill_attention.tile_kernel import prefill_tile_kernel

__all__ = ["PrefillProblem", "key_descriptor", "launch_hopper", "launch_tile"]

# Operand widths, in bits, for which the two consumers take turns at issuing their products.
PING_PONG = (16,)
# Stages of the ring of K and V tiles, by operand width; head_dim 256 has room for two.
STAGES = {8: 4, 16: 3}
# From so many new tokens on, one kv head's queries come after the other's, so that L2 holds the keys they share.
GROUP_BY_GROUP_TOKENS = 16384


@dataclass(frozen=True)
class PrefillProblem:
    """The tensors and scalars of one prefill call, checked; shapes as in `prefill_attention`."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    out: Tensor
    lse: Tensor
    scale: float
    soft_cap: float | None = None
    window: int | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def key_descriptor(k_pages: Tensor, *, permuted: bool) -> TensorDescriptor:
    """The tensor map that loads one page of one head, 128 bytes of head_dim at a time.

    `permuted` walks the tokens so that scores come out in the register order that an fp8 left operand wants: row
    `16 a + 8 b + 2 c + e` of the tile is token `16 a + 2 b + 4 c + e` of the page.
    """
    pages, kv_heads, tokens, head_dim = k_pages.shape
    bits = 8 * k_pages.element_size()
    box = min(head_dim, 1024 // bits)
    rows = pages * kv_heads * tokens
    if permuted:
        layout = gl.NVMMASharedLayout(box * bits // 8, bits, 5)
        strides = [16 * head_dim, 2 * head_dim, 4 * head_dim, head_dim, 1]
        return TensorDescriptor(k_pages, [rows // 16, 2, 4, 2, head_dim], strides, [4, 2, 4, 2, box], layout)
    layout = gl.NVMMASharedLayout(box * bits // 8, bits, 2)
    return TensorDescriptor(k_pages, [rows, head_dim], [head_dim, 1], [64, box], layout)


def launch_hopper(problem: PrefillProblem, plan: Tensor) -> None:
    """Run the Gluon kernel over a plan of `prefill_plan`."""
    q, k_pages = problem.q, problem.k_pages
    tokens, heads, head_dim = q.shape
    num_pages, kv_heads = k_pages.shape[:2]
    bits = 8 * q.element_size()
    box = min(head_dim, 1024 // bits)
    q_layout = gl.NVMMASharedLayout(box * bits // 8, bits, 2)
    v_layout = gl.NVMMASharedLayout(64 * bits // 8, bits, 2)
    ctas = torch.cuda.get_device_properties(q.device).multi_processor_count
    prefill_hopper_kernel[(ctas,)](
        TensorDescriptor(q, [tokens, heads * head_dim], [heads * head_dim, 1], [64, box], q_layout),
        key_descriptor(k_pages, permuted=bits == 8),
        TensorDescriptor(problem.v_pages, [num_pages * kv_heads * head_dim, 64], [64, 1], [head_dim, 64], v_layout),
        plan,
        problem.block_table,
        problem.out,
        problem.lse,
        problem.q_scale,
        problem.k_scale,
        problem.v_scale,
        heads,
        kv_heads,
        heads if tokens < GROUP_BY_GROUP_TOKENS else heads // kv_heads,
        problem.block_table.stride(0),
        problem.scale,
        problem.soft_cap or 0.0,
        problem.window or 0,
        HAS_Q_SCALE=problem.q_scale is not None,
        HAS_KV_SCALE=problem.k_scale is not None,
        PER_HEAD=int(problem.k_scale is not None and problem.k_scale.numel() > 1),
        SOFT_CAP=problem.soft_cap is not None,
        WINDOW=problem.window is not None,
        STAGES=STAGES[bits] if head_dim <= 128 else 2,
        D=head_dim,
        N=128 if head_dim <= 128 else 64,
        PERMUTE=bits == 8,
        PING_PONG=bits in PING_PONG,
        REGISTERS=240,
        num_warps=4,
    )


def launch_tile(problem: PrefillProblem, plan: Tensor) -> None:
    """Run the plain-Triton kernel, the fallback and oracle of the Gluon one."""
    q, k_pages = problem.q, problem.k_pages
    heads, head_dim = q.shape[1:]
    prefill_tile_kernel[(len(plan) - 1, heads)](
        q,
        k_pages,
        problem.v_pages,
        plan,
        problem.block_table,
        problem.out,
        problem.lse,
        problem.q_scale,
        problem.k_scale,
        problem.v_scale,
        heads,
        k_pages.shape[1],
        problem.block_table.stride(0),
        problem.scale,
        problem.soft_cap or 0.0,
        problem.window or 0,
        HAS_Q_SCALE=problem.q_scale is not None,
        HAS_KV_SCALE=problem.k_scale is not None,
        PER_HEAD=int(problem.k_scale is not None and problem.k_scale.numel() > 1),
        SOFT_CAP=problem.soft_cap is not None,
        D=head_dim,
        BLOCK_M=QUERY_TILE,
        num_warps=8,
    )
