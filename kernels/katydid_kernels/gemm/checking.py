"""Oracles of the GEMM kernels in float64, for the tests and for the benchmark, which times nothing that fails them.

Every check draws fresh operands, poisons what is to be written with NaN, and returns the relative error
``|out - ref| / |ref|`` (infinity where an element was not written or one outside was).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from katydid_kernels.gemm.dense import BLOCK
from katydid_kernels.gemm.expert_scales import ExpertScales
from katydid_kernels.gemm.experts import ExpertWorkspace, run_experts
from katydid_kernels.gemm.launch import launch_narrow, launch_wide
from katydid_kernels.gemm.tuning import DecodeTile, FewTile, NarrowTile, UpTile, WideTile
from katydid_kernels.quantize_rows import quantize_fp8_reference

__all__ = [
    "E4M3",
    "ExpertCase",
    "block_operands",
    "check_block_experts",
    "check_experts",
    "check_gemm",
    "expert_operands",
    "relative_error",
]

E4M3 = torch.float8_e4m3fn
ExpertCase = tuple[int, int, int, int, int]


def relative_error(out: Tensor, reference: Tensor) -> float:
    error = ((out.double() - reference).norm() / reference.norm()).item()
    return error if error == error else float("inf")


def check_gemm(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    tile: WideTile | NarrowTile,
    *,
    promote: bool,
    hooks: bool,
    blocks: bool = False,
) -> float:
    """One product of the shape ``(m, n, k)``: hooks, with vector scales, bias, residual; blocks, block scales."""
    m, n, k = shape
    a = torch.randn(m, k, device="cuda").to(dtype)
    b = torch.randn(n, k, device="cuda").to(dtype)
    reference = a.double() @ b.double().T
    extra: dict[str, Any] = {}
    if hooks:
        extra = {
            "row_scale": torch.rand(m, device="cuda") + 0.5,
            "col_scale": torch.rand(n, device="cuda") + 0.5,
            "bias": torch.randn(n, device="cuda").bfloat16(),
            "residual": torch.randn(m, n, device="cuda").bfloat16(),
        }
        reference = reference * extra["row_scale"].double()[:, None] * extra["col_scale"].double()
        reference = reference + extra["bias"].double() + extra["residual"].double()
    if blocks:
        rows = torch.rand(m, k // BLOCK, device="cuda") + 0.5
        cols = torch.rand(-(-n // BLOCK), k // BLOCK, device="cuda") + 0.5
        extra |= {"row_scale": rows, "col_scale": cols}
        wide_b = b.double() * cols.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)
        reference = (a.double() * rows.repeat_interleave(BLOCK, 1)) @ wide_b.T
    out = torch.full((m + 2, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    for _ in range(2):  # the second run finds counters and scratch as the first left them
        out.fill_(float("nan"))
        if isinstance(tile, NarrowTile):
            launch_narrow(a, b, out[:m], tile, promote=promote, **extra)
        else:
            launch_wide(a, b, out[:m], tile, promote=promote, **extra)
    if not out[m:].isnan().all():
        return float("inf")
    return relative_error(out[:m], reference)


def expert_operands(
    case: ExpertCase, hidden: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, ExpertScales]:
    """x, w13, w2, weights, ids and scales of a case ``(experts, width, tokens, top_k, first_expert)``.

    Ids are drawn from ``experts + 2 * first_expert`` so that the local ones are in their middle.
    """
    experts, width, tokens, top_k, first = case
    total = experts + 2 * first
    ids = torch.cat(
        [torch.rand(min(2048, tokens - at), total, device="cuda").topk(top_k).indices for at in range(0, tokens, 2048)]
    )
    x = torch.randn(tokens, hidden, device="cuda").to(dtype)
    w13 = torch.randn(experts, 2 * width, hidden, device="cuda", dtype=torch.bfloat16).to(dtype)
    w2 = torch.randn(experts, hidden, width, device="cuda", dtype=torch.bfloat16).to(dtype)
    scales = ExpertScales(
        (torch.rand(experts, 2, device="cuda") + 0.5) / hidden**0.5,
        (torch.rand(experts, device="cuda") + 0.5) / width**0.5,
        torch.full((1,), 16.0, device="cuda"),
        torch.rand(tokens, device="cuda") + 0.5 if tokens % 2 else None,
    )  # fmt: skip
    return x, w13, w2, torch.rand(tokens, top_k, device="cuda"), ids.int(), scales


def block_operands(case: ExpertCase, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, ExpertScales]:
    """`expert_operands` in e4m3 with scales of blocks."""
    experts, width, tokens, _, _ = case
    x, w13, w2, weights, ids, _ = expert_operands(case, hidden, E4M3)
    scales = ExpertScales(
        (torch.rand(experts, 2 * width // BLOCK, hidden // BLOCK, device="cuda") + 0.5) / hidden**0.5,
        (torch.rand(experts, hidden // BLOCK, width // BLOCK, device="cuda") + 0.5) / width**0.5,
        torch.ones(1, device="cuda"),
        torch.rand(tokens, hidden // BLOCK, device="cuda") + 0.5,
    )
    return x, w13, w2, weights, ids, scales


def check_block_experts(case: ExpertCase, hidden: int) -> float:
    """One batch with scales of blocks against the product of the dequantised operands in fp64."""
    experts, width, tokens, top_k, first = case
    x, w13, w2, weights, ids, scales = block_operands(case, hidden)
    assert scales.token is not None
    workspace = ExpertWorkspace.allocate(tokens + 5, top_k, w2.shape, E4M3, w2.device, of_blocks=True)
    workspace.y.fill_(float("nan"))
    out = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        out.fill_(float("nan"))
        run_experts(x, w13, w2, weights, ids, out, scales, workspace, first_expert=first)
    reference = torch.zeros(tokens, hidden, device="cuda", dtype=torch.float64)
    wide = x.double() * scales.token.repeat_interleave(BLOCK, 1)
    for expert in range(experts):
        token, choice = torch.where(ids == expert + first)
        up = scales.up[expert].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        gate_up = wide[token] @ (w13[expert].double() * up).T
        h = (torch.nn.functional.silu(gate_up[:, :width]) * gate_up[:, width:]).bfloat16()
        q, q_scale = quantize_fp8_reference(h, group=BLOCK)
        down = scales.down[expert].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        y = (q.double() * q_scale.repeat_interleave(BLOCK, 1)) @ (w2[expert].double() * down).T
        reference.index_add_(0, token, weights[token, choice, None] * y)
    return relative_error(out, reference)


def check_experts(
    case: ExpertCase,
    hidden: int,
    dtype: torch.dtype,
    *,
    tile: FewTile | DecodeTile | UpTile | None = None,
    crowd: bool = False,
) -> float:
    """One batch against an expert-by-expert product; h is rounded as the kernels round it.

    crowd: every token also goes to expert 0.
    """
    experts, width, tokens, top_k, first = case
    x, w13, w2, weights, ids, scales = expert_operands(case, hidden, dtype)
    if crowd:
        ids[:, 0] = first
        ids[:, 1:] = torch.where(ids[:, 1:] == first, ids[:, 1:] + 1, ids[:, 1:])
    shared = torch.randn(tokens, hidden, device="cuda").bfloat16()
    workspace = ExpertWorkspace.allocate(tokens + 5, top_k, w2.shape, dtype, w2.device)
    workspace.y.fill_(float("nan"))
    # Rows of h that no pair owns are fetched too; the columns that pad a row must stay zero.
    workspace.h[:, :width].view(torch.uint8).fill_(0x7F)
    out = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        out.fill_(float("nan"))
        run_experts(x, w13, w2, weights, ids, out, scales, workspace, first_expert=first, shared=shared, tile=tile)
    reference = shared.double()
    wide = x.float() if scales.token is None else x.float() * scales.token[:, None]
    for expert in range(experts):
        token, choice = torch.where(ids == expert + first)
        gate_up = wide[token] @ w13[expert].float().T
        gate, up = gate_up[:, :width] * scales.up[expert, 0], gate_up[:, width:] * scales.up[expert, 1]
        h = torch.nn.functional.silu(gate) * up * scales.inverse_h
        h = (h.clamp(-448, 448) if dtype == E4M3 else h).to(dtype).float()
        y = h @ w2[expert].float().T * scales.down[expert]
        reference.index_add_(0, token, (weights[token, choice, None] * y).double())
    return relative_error(out, reference)
