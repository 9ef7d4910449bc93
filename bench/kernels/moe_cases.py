"""Hy3's routed experts on one rank, end to end: plan, both products, SwiGLU, quantisation, weighted sum."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gemm_timing import BF16, BF16_TFLOPS, COPY_TB_PER_S, E4M3, FP8_TFLOPS, Row, measuring, median_us, preparing, row
from katydid_kernels.gemm import experts as launches
from katydid_kernels.gemm.checking import check_experts, expert_operands
from katydid_kernels.gemm.combine import combine
from katydid_kernels.gemm.experts import ExpertWorkspace, run_experts
from katydid_kernels.gemm.launch import launch_wide
from katydid_kernels.gemm.plan import plan_routes
from katydid_kernels.gemm.tuning import DecodeTile, FewTile, UpTile, down_tile, up_tile
from torch import Tensor

__all__ = ["experts", "tiles"]

HIDDEN, TOP_K = 4096, 8
QUANTISED_HIDDEN = 1.5e-2
SIZES = {"TP8": (1, 4, 16, 64, 256, 1024, 4096, 16384), "EP8": (16, 64, 128, 1024), "bf16 TP8": (64, 16384)}

# Microseconds of the best public kernel for the same case on this GPU, measured before by the same method: hpc-ops
# 6e2eced or vLLM 0.26's Triton kernel with its default configuration, whichever is faster.
PEERS = {
    ("TP8", 1): 25.2, ("TP8", 4): 40.3, ("TP8", 16): 71.1, ("TP8", 64): 134.0, ("TP8", 256): 148.0,
    ("TP8", 1024): 186.0, ("TP8", 4096): 485.0, ("TP8", 16384): 1708.0,
    ("EP8", 16): 133.0, ("EP8", 64): 139.0, ("EP8", 1024): 382.0,
}  # fmt: skip
BARS = {
    ("TP8", 1): ("us", 12), ("TP8", 16): ("%", 85), ("TP8", 64): ("%", 85), ("TP8", 256): ("%", 85),
    ("TP8", 4096): ("TFLOP/s", 520), ("TP8", 16384): ("TFLOP/s", 600),
    ("EP8", 16): ("%", 88), ("EP8", 64): ("%", 88), ("EP8", 128): ("%", 88), ("EP8", 1024): ("TFLOP/s", 950),
    ("bf16 TP8", 64): ("%", 85), ("bf16 TP8", 16384): ("TFLOP/s", 600),
}  # fmt: skip
# experts, width, tokens, top_k, first expert; hidden size; whether every token also goes to the first expert
ODD_SHAPES = [
    ((5, 192, 37, 2, 0), 512, False),
    ((257, 192, 64, 1, 0), 1024, False),
    ((128, 64, 9, 1, 0), 128, False),
    ((16, 384, 41, 8, 4), 4096, False),
    ((8, 1536, 300, 8, 8), 4096, False),
    ((24, 192, 900, 8, 0), 4096, True),
]


class Batch:
    """One size of one shard: operands, and the call to time."""

    def __init__(self, shard: str, tokens: int, weights: list[tuple[Tensor, Tensor]]) -> None:
        count, _, width = weights[0][1].shape
        dtype = weights[0][0].dtype
        self.weights = weights
        self.key = (shard, tokens)
        self.x = torch.randn(tokens, HIDDEN, device="cuda").to(dtype)
        self.scales = expert_operands((count, width, 2, TOP_K, 0), HIDDEN, dtype)[-1]
        self.router_weights = torch.rand(tokens, TOP_K, device="cuda")
        self.shared = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        self.out = torch.empty(tokens, HIDDEN, device="cuda", dtype=BF16)
        self.workspace = ExpertWorkspace.allocate(tokens, TOP_K, weights[0][1].shape, dtype, self.x.device)
        # Few tokens hit few experts: many draws, so that no weight is still in L2 when it comes again.
        draws = 12 if tokens <= 4 else 1
        rows = [torch.rand(min(tokens, 2048), count, device="cuda").topk(TOP_K).indices.int() for _ in range(draws)]
        self.ids = [draw.repeat(max(1, tokens // 2048), 1) for draw in rows]

    def run(self, pair: tuple[Tensor, Tensor], ids: Tensor, tile: FewTile | DecodeTile | UpTile | None = None) -> Tensor:
        w13, w2 = pair
        return run_experts(
            self.x, w13, w2, self.router_weights, ids, self.out, self.scales, self.workspace,
            shared=self.shared, tile=tile,
        )  # fmt: skip

    def time_us(self, tile: FewTile | DecodeTile | UpTile | None = None, replays: int = 15) -> float:
        return median_us([partial(self.run, pair, ids, tile) for ids in self.ids for pair in self.weights], replays)

    def rows(self) -> list[Row]:
        (count, hidden, width), dtype = self.weights[0][1].shape, self.x.dtype
        us = self.time_us()
        hit = sum(len(ids.unique()) for ids in self.ids) / len(self.ids)
        byte_us = hit * 3 * width * hidden * dtype.itemsize / COPY_TB_PER_S * 1e-6
        tera = 6e-6 * len(self.x) * TOP_K * width * hidden
        floor = max(byte_us, tera / (FP8_TFLOPS if dtype == E4M3 else BF16_TFLOPS))
        unit, bar = BARS.get(self.key, ("us", None))
        peer_us = PEERS.get(self.key)
        peer = None if peer_us is None else "best public kernel, measured earlier"
        name = f"fused MoE {self.key[0]} {self.key[1]} tokens, {hit:.0f} of {count} experts hit"
        rows = [row(name, us, "us", floor, bar if unit == "us" else None, peer, peer_us)]
        if unit == "%":
            theirs = peer_us and 100 * byte_us / peer_us
            rows.append(row(f"{name}: share of copy bandwidth", 100 * byte_us / us, "%", 100, bar, peer, theirs))
        if unit == "TFLOP/s":
            rows.append(row(f"{name}: rate", tera / us, unit, tera / floor, bar, peer, peer_us and tera / peer_us))
        return rows

    def steps(self) -> dict[str, float]:
        """Microseconds of each launch of a batch, by itself."""
        plan, ids, w2 = self.workspace.plan, self.ids[0], self.weights[0][1]
        tile = launches.choose_tile(ids.numel(), len(w2), w2.shape[2], w2.shape[1], w2.dtype)
        calls = {"plan": [partial(plan_routes, ids, plan, len(w2), tile.tokens)] * 4}
        if isinstance(tile, UpTile):
            up = partial(launches._launch_up, self.x, scales=self.scales, workspace=self.workspace, tile=tile)
            calls["up"] = [partial(up, w13=w13) for w13, _ in self.weights]
            calls["down"] = [
                partial(
                    launch_wide, self.workspace.h, w2, self.workspace.y, down_tile(HIDDEN, tile.tokens), col_scale=self.scales.down,
                    tiles=plan.tiles, tile_count=plan.tile_count,
                )
                for _, w2 in self.weights
            ]  # fmt: skip
            calls["combine"] = [
                partial(combine, self.workspace.y, plan.slots[: len(ids)], self.router_weights, self.out)
            ] * 2
        return {name: round(median_us(call, 8), 1) for name, call in calls.items()}


def _weights(shard: str) -> list[tuple[Tensor, Tensor]]:
    count, width = (24, 1536) if shard == "EP8" else (192, 192)
    dtype = BF16 if shard.startswith("bf16") else E4M3
    _, w13, w2, *_ = expert_operands((count, width, 1, TOP_K, 0), HIDDEN, dtype)
    return [(w13, w2), (w13.clone(), w2.clone())]


def experts(shard: str) -> dict[str, Any]:
    """`shard`: TP8, EP8 (24 of 192 experts, 8 rows a token) or bf16 TP8."""
    with preparing():
        dtype = BF16 if shard.startswith("bf16") else E4M3
        count, width = (24, 1536) if shard == "EP8" else (192, 192)
        # Up to 32 rows an expert decode in one launch, more are grouped GEMMs; an odd size has a scale a token.
        sizes = {1, 3, 17, 64, 2 * count - 1, 4 * count, 4 * count + 1, 1000}
        errors = [
            check_experts((count, width, tokens, TOP_K, 0), HIDDEN, dtype, crowd=tokens == 1000)
            for tokens in sorted(sizes)
        ]
        if max(errors) > QUANTISED_HIDDEN:
            return {"errors": errors, "rows": []}
        weights = _weights(shard)
        batches = [Batch(shard, tokens, weights) for tokens in SIZES[shard]]
        for batch in batches:
            batch.run(weights[0], batch.ids[0])
    with measuring():
        rows = [found for batch in batches for found in batch.rows()]
        steps = {batch.key[1]: batch.steps() for batch in batches if batch.key[1] in (1, 64, 256, 4096, 16384)}
    return {"errors": errors, "steps_us": steps, "rows": rows}


def odd_shapes() -> dict[str, Any]:
    """Errors of cases far from the tuned ones, in fp8 and bf16."""
    with preparing():
        return {
            "errors": [
                [check_experts(case, hidden, dtype, crowd=crowd) for case, hidden, crowd in ODD_SHAPES]
                for dtype in (E4M3, BF16)
            ],
            "rows": [],
        }


def tiles(shard: str) -> dict[str, Any]:
    """Where the decode kernel hands over to the grouped GEMMs, and which of its tiles is best on the way there."""
    sizes = {"TP8": (1, 4, 16, 64, 256, 512), "EP8": (16, 64, 128)}[shard]
    with preparing():
        weights = _weights(shard)
        candidates: list[DecodeTile | UpTile] = [
            DecodeTile(8, 64, 2, 11, True),
            DecodeTile(16, 64, 2, 10, True),
            DecodeTile(32, 64, 2, 9, True),
            DecodeTile(64, 64, 2, 8, True),
            up_tile(weights[0][1].shape[2], HIDDEN, E4M3),
        ]
        batches = [Batch(shard, tokens, weights) for tokens in sizes]
        for tile in candidates:
            batches[0].run(weights[0], batches[0].ids[0], tile)
    with measuring():
        found = {f"{b.key[1]} tokens, {tile}": round(b.time_us(tile, 8), 1) for b in batches for tile in candidates}
    return {"us": found, "rows": []}
