"""Oracles of the W4A8 kernels in float64, for the tests and for the benchmark, which times nothing that fails them.

As in `gemm.checking`: fresh operands, NaN where a kernel is to write, and the relative error ``|out - ref| / |ref|``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_kernels.gemm.checking import E4M3, ExpertCase, relative_error
from katydid_kernels.w4a8.experts import Int4ExpertWorkspace, run_experts_w4a8
from katydid_kernels.w4a8.launch import launch_few, launch_grouped, launch_narrow
from katydid_kernels.w4a8.packing import GROUP, Int4Weight, dequantize_int4, pack_int4, unpack_int4
from katydid_kernels.w4a8.tuning import DecodeTile, FewTile, GroupedTile, NarrowTile

__all__ = ["check_experts", "check_linear", "random_weight"]


def random_weight(*shape: int, gated: bool = False) -> Int4Weight:
    """All codes, and scales of either sign that make a product of unit variance from x of unit variance."""
    codes = torch.randint(-8, 8, shape, dtype=torch.int8, device="cuda")
    groups = (*shape[:-1], -(-shape[-1] // GROUP))
    scales = (torch.rand(groups, device="cuda") + 0.5) / (4.6 * shape[-1] ** 0.5)
    return pack_int4(codes, torch.where(torch.rand(groups, device="cuda") < 0.1, -scales, scales), gated=gated)


def check_linear(shape: tuple[int, int, int], tile: FewTile | NarrowTile | GroupedTile, *, hooks: bool) -> float:
    """One product of the shape ``(m, n, k)``, with a scale a token, bias and residual where `hooks`."""
    m, n, k = shape
    x, weight = torch.randn(m, k, device="cuda").to(E4M3), random_weight(n, k)
    scale = torch.rand(m if hooks else 1, device="cuda") + 0.5
    reference = x.double() @ dequantize_int4(*unpack_int4(weight)).double().T * scale.double()[:, None]
    extra: dict[str, Tensor] = {}
    if hooks:
        extra = {
            "bias": torch.randn(n, device="cuda").bfloat16(),
            "residual": torch.randn(m, n, device="cuda").bfloat16(),
        }
        reference = reference + extra["bias"].double() + extra["residual"].double()
    out = torch.empty(m + 2, n, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):  # the second run finds counters and scratch as the first left them
        out.fill_(float("nan"))
        if isinstance(tile, NarrowTile):
            launch_narrow(x, weight, scale, out[:m], tile, **extra)
        elif isinstance(tile, FewTile):
            launch_few(x, weight, scale, out[:m], tile, **extra)
        else:
            launch_grouped(x, weight, out[:m], tile, x_scale=scale, **extra)
    if not out[m:].isnan().all():
        return float("inf")
    return relative_error(out[:m], reference)


def check_experts(
    case: ExpertCase, hidden: int, *, tile: DecodeTile | GroupedTile | None = None, crowd: bool = False
) -> float:
    """One batch against an expert-by-expert product; h is rounded as the kernels round it.

    crowd: every token also goes to expert 0.
    """
    experts, width, tokens, top_k, first = case
    ids = torch.rand(tokens, experts + 2 * first, device="cuda").topk(top_k).indices.int()
    if crowd:
        ids[:, 0] = first
        ids[:, 1:] = torch.where(ids[:, 1:] == first, ids[:, 1:] + 1, ids[:, 1:])
    x = torch.randn(tokens, hidden, device="cuda").to(E4M3)
    x_scale = torch.rand(tokens if tokens % 2 else 1, device="cuda") + 0.5
    h_scale = torch.full((1,), 1 / 16, device="cuda")
    w13, w2 = random_weight(experts, 2 * width, hidden, gated=True), random_weight(experts, hidden, width)
    weights, shared = torch.rand(tokens, top_k, device="cuda"), torch.randn(tokens, hidden, device="cuda").bfloat16()
    workspace = Int4ExpertWorkspace.allocate(tokens + 5, top_k, experts, hidden, width, x.device)
    workspace.y.fill_(float("nan"))
    workspace.partial.fill_(float("nan"))
    out = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        out.fill_(float("nan"))
        run_experts_w4a8(
            x, w13, w2, weights, ids, x_scale, h_scale, out, workspace,
            first_expert=first, shared=shared, tile=tile,
        )  # fmt: skip
    reference = shared.double()
    wide = x.float() * x_scale.reshape(-1, 1)
    for expert in range(experts):
        token, choice = torch.where(ids == expert + first)
        gate, up = (wide[token] @ _expert(w13, expert).T).chunk(2, dim=1)
        h = (torch.nn.functional.silu(gate) * up / h_scale).clamp(-448, 448).to(E4M3).float()
        y = h @ _expert(w2, expert).T * h_scale
        reference.index_add_(0, token, (weights[token, choice, None] * y).double())
    return relative_error(out, reference)


def _expert(weight: Int4Weight, expert: int) -> Tensor:
    one = Int4Weight(weight.codes[expert], weight.scales[expert], weight.rows, weight.cols, weight.gated)
    return dequantize_int4(*unpack_int4(one))
