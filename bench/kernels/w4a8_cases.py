"""W4A8 beside our own fp8: linear layers of few rows, and Hy3's routed experts, with cold weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from expert_draws import TOP_K, draw_ids, hit_experts, typical_error
from gemm_timing import BF16, COPY_TB_PER_S, E4M3, FP8_TFLOPS, Row, measuring, median_us, preparing, row
from katydid_kernels import ExpertScales, fused_moe, fused_moe_w4a8, linear_fp8, linear_w4a8
from katydid_kernels.linear_few import linear_few, takes_few
from katydid_kernels.w4a8.checking import check_experts, check_linear
from katydid_kernels.w4a8.packing import GROUP, Int4Weight
from katydid_kernels.w4a8.tuning import FewTile, grouped_tile, narrow_tile

__all__ = ["experts", "linear"]

HIDDEN = 4096
# Rounding of the result to bf16; of h to e4m3, where a tie can fall either way.
ROUNDING, QUANTISED_HIDDEN = 2.2e-3, 1.5e-2
BYTES_A_CODE = 0.5 + 2 / GROUP
LINEAR_BAR = 1.6
SIZES = {"TP8": (1, 2, 4, 16, 32, 64, 256, 1024), "EP8": (1, 16, 64, 128, 256, 1024)}


def _bar(tokens: int) -> float:
    """How many times as fast as fp8."""
    return 1.1 if tokens <= 4 else 1.5 if 16 <= tokens <= 64 else 1.0


def _random(*shape: int, gated: bool = False) -> Int4Weight:
    """Every byte of codes is a valid pair of them."""
    *lead, n, k = shape
    codes = torch.randint(0, 256, (*lead, -(-n // 64), -(-k // 64) * 16, 128), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(*lead, -(-n // 64), -(-k // GROUP), 64, device="cuda") + 0.5) / (4.6 * k**0.5)
    return Int4Weight(codes, scales.bfloat16(), n, k, gated)


def _beside_fp8(name: str, ours: float, fp8: float, floor: float, bar: float) -> list[Row]:
    return [
        row(name, ours, "us", floor, None, "our fp8", fp8),
        row(f"{name}: times as fast as fp8", fp8 / ours, "x", 1 / BYTES_A_CODE, bar, None, None),
    ]


def linear() -> dict[str, Any]:
    with preparing():
        errors = [
            check_linear(shape, narrow_tile(shape[0]) or grouped_tile(), hooks=hooks)
            for shape in ((1, 64, 256), (5, 264, 112), (16, 1000, 1040), (31, 10240, 4096), (64, 4104, 8192),
                          (700, 1000, 1024))
            for hooks in (False, True)
        ]  # fmt: skip
        errors += [
            check_linear(shape, FewTile(warps), hooks=True)
            for shape in ((1, 64, 256), (5, 264, 112), (8, 1000, 1040), (2, 4096, 4096))
            for warps in (8, 16)
        ]
        if max(errors) > ROUNDING:
            return {"errors": errors, "rows": []}
    rows = []
    # Hy3's q, k, v and o: of one of eight ranks, and whole.
    for n, k in ((1280, 4096), (4096, 1024), (10240, 4096), (4096, 8192)):
        with preparing():
            # Enough copies that none is still in L2 when it comes again.
            packed = [_random(n, k) for _ in range(min(47, max(2, int(130e6 / (n * k * BYTES_A_CODE)))))]
            e4m3 = [torch.randn(n, k, device="cuda", dtype=BF16).to(E4M3) for _ in range(max(2, int(130e6 / (n * k))))]
            one = torch.full((1,), 0.5, device="cuda")
            xs = [torch.randn(m, k, device="cuda").to(E4M3) for m in (1, 4, 16, 64)]
            for x in xs:
                linear_w4a8(x, packed[0], one)
                _linear_fp8(x, one, e4m3[0])
        with measuring():
            for x in xs:
                ours = median_us([partial(linear_w4a8, x, w, one) for w in packed], 10)
                fp8 = median_us([partial(_linear_fp8, x, one, w) for w in e4m3], 10)
                floor = (n * k * BYTES_A_CODE + len(x) * (k + 2 * n)) / COPY_TB_PER_S * 1e-6
                rows += _beside_fp8(f"W4A8 {len(x)}x{n}x{k}", ours, fp8, floor, LINEAR_BAR)
    return {"errors": errors, "rows": rows}


def _linear_fp8(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the engine does it: the fewest rows have a kernel of their own."""
    if takes_few(x, weight):
        return linear_few(x, weight, scale, x_scale=scale)
    return linear_fp8(x, weight, scale, scale)


def experts(shard: str) -> dict[str, Any]:
    """`shard`: TP8, or EP8 (24 of 192 experts, 8 rows a token)."""
    count, width = (24, 1536) if shard == "EP8" else (192, 192)
    with preparing():
        errors = [
            typical_error(partial(check_experts, (count, width, tokens, TOP_K, 0), HIDDEN, crowd=tokens == 100), tokens)
            for tokens in sorted({1, 6, 7, 100, 8 * count + 1} | {int(m * count / TOP_K) for m in (2, 8, 20, 60)})
        ] + [
            check_experts((16, 384, 41, 8, 4), HIDDEN),
            check_experts((128, 64, 90, 1, 0), 384),
            check_experts((257, 192, 64, 1, 0), 1024),
        ]
        if max(errors) > QUANTISED_HIDDEN:
            return {"errors": errors, "rows": []}
        packed = [
            (_random(count, 2 * width, HIDDEN, gated=True), _random(count, HIDDEN, width)) for _ in range(2)
        ]  # fmt: skip
        w13 = torch.randn(count, 2 * width, HIDDEN, device="cuda", dtype=BF16).to(E4M3)
        w2 = torch.randn(count, HIDDEN, width, device="cuda", dtype=BF16).to(E4M3)
        e4m3 = [(w13, w2), (w13.clone(), w2.clone())]
        batches = [_Batch(count, width, tokens) for tokens in SIZES[shard]]
        for batch in batches:
            batch.w4a8(packed[0], batch.ids[0])
            batch.fp8(e4m3[0], batch.ids[0])
    rows = []
    for batch in batches:
        with measuring():
            ours = median_us([partial(batch.w4a8, pair, ids) for ids in batch.ids for pair in packed], 15)
            fp8 = median_us([partial(batch.fp8, pair, ids) for ids in batch.ids for pair in e4m3], 15)
        tokens = len(batch.x)
        hit = sum(hit_experts(ids) for ids in batch.ids) / len(batch.ids)
        byte_us = hit * 3 * width * HIDDEN * BYTES_A_CODE / COPY_TB_PER_S * 1e-6
        floor = max(byte_us, 6e-6 * tokens * TOP_K * width * HIDDEN / FP8_TFLOPS)
        name = f"W4A8 MoE {shard} {tokens} tokens, {hit:.0f} of {count} experts hit"
        rows += _beside_fp8(name, ours, fp8, floor, _bar(tokens))
    return {"errors": errors, "rows": rows}


class _Batch:
    """One size: operands, and the two calls to time."""

    def __init__(self, count: int, width: int, tokens: int) -> None:
        self.x = torch.randn(tokens, HIDDEN, device="cuda").to(E4M3)
        self.x_scale = torch.rand(tokens, device="cuda") + 0.5
        self.h_scale = torch.full((1,), 1 / 16, device="cuda")
        self.scales = ExpertScales(
            torch.full((count, 2), HIDDEN**-0.5, device="cuda"), torch.full((count,), width**-0.5, device="cuda"),
            1 / self.h_scale, self.x_scale,
        )  # fmt: skip
        self.router_weights = torch.rand(tokens, TOP_K, device="cuda")
        self.shared = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        self.ids = draw_ids(tokens, count)

    def w4a8(self, pair: tuple[Int4Weight, Int4Weight], ids: torch.Tensor) -> torch.Tensor:
        return fused_moe_w4a8(
            self.x, *pair, self.router_weights, ids, self.x_scale, self.h_scale, shared_output=self.shared
        )

    def fp8(self, pair: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return fused_moe(self.x, *pair, self.router_weights, ids, shared_output=self.shared, scales=self.scales)
