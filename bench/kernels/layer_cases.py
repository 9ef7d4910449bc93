"""The whole fp8 MoE layer of Hy3 on one TP8 rank as the engine runs it, a row a size: residual, norm, quantisation and
router, then routed experts and the shared one, which is the last of them and to which every token goes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from expert_draws import hit_experts
from gemm_timing import BF16, COPY_TB_PER_S, E4M3, FP8_TFLOPS, Row, compiling, measuring, median_us, preparing, row
from katydid_kernels import RouterWeight, add_rms_norm_route, fused_moe
from katydid_kernels.gemm.checking import expert_operands
from torch import Tensor

__all__ = ["layer"]

EXPERTS, HIDDEN, WIDTH, TOP_K = 192, 4096, 192, 8
SIZES = (1, 16, 64, 256, 1024, 4096, 16384)


class _Layer:
    """One layer's weights; x and h have constant scales, as the checkpoint gives them."""

    def __init__(self) -> None:
        _, self.w13, self.w2, *_, self.scales = expert_operands((EXPERTS + 1, WIDTH, 2, TOP_K, 0), HIDDEN, E4M3)
        self.norm = torch.rand(HIDDEN, device="cuda") + 0.5
        self.router = RouterWeight.prepare(torch.randn(EXPERTS, HIDDEN, device="cuda") / 64)
        self.bias = torch.rand(EXPERTS, device="cuda") / 16
        self.scale = torch.full((1,), 0.05, device="cuda")

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        routed = add_rms_norm_route(
            x, residual, self.norm, 1e-5, self.router, top_k=TOP_K, scoring="sigmoid", selection_bias=self.bias,
            scale=2.0, shared=True, fp8=True, fp8_scale=self.scale,
        )  # fmt: skip
        assert routed.q is not None
        out = fused_moe(routed.q, self.w13, self.w2, routed.weights, routed.ids, scales=self.scales)
        return out, routed.total, routed.ids


def layer() -> dict[str, Any]:
    with preparing():
        layers = [_Layer(), _Layer()]
        inputs = {tokens: _rows(tokens) for tokens in SIZES}
    with compiling():
        for x, residual in inputs.values():
            layers[0](x[0], residual[0])
    with preparing():
        for x, residual in inputs.values():
            layers[0](x[0], residual[0])
    with measuring():
        return {"rows": [_row(layers, *inputs[tokens]) for tokens in SIZES]}


def _rows(tokens: int) -> tuple[Tensor, Tensor]:
    """Few tokens hit few experts: many draws, so that no weight is still in L2 when it comes again."""
    draws = 12 if tokens <= 4 else 1
    x, residual = (torch.randn(draws, tokens, HIDDEN, device="cuda", dtype=BF16) for _ in range(2))
    return x, residual


def _row(layers: list[_Layer], x: Tensor, residual: Tensor) -> Row:
    tokens = x.shape[1]
    calls = [partial(each, *rows) for rows in zip(x, residual, strict=True) for each in layers]
    us = median_us(calls, 15)
    hit = sum(hit_experts(call()[2]) for call in calls) / len(calls)
    matrices = hit * 3 * WIDTH * HIDDEN
    # Router weights in fp32; x, residual and output in bf16, and the sum that goes on.
    rest = EXPERTS * HIDDEN * 4 + 4 * 2 * tokens * HIDDEN
    floor = max((matrices + rest) / COPY_TB_PER_S * 1e-6, 6e-6 * tokens * (TOP_K + 1) * WIDTH * HIDDEN / FP8_TFLOPS)
    return row(
        f"whole fp8 MoE layer, TP8, {tokens} tokens, {hit - 1:.0f} experts hit", us, "us", floor, None, None, None
    )
