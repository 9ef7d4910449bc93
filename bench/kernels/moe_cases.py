"""Routed experts of Hy3 and Qwen3-MoE on one rank, end to end: plan, both products, SwiGLU, quantisation, weighted sum.

Measured here, made into rows by `moe_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from expert_draws import TOP_K, draw_ids, hit_experts, typical_error
from gemm_timing import BF16, E4M3, compiling, measuring, median_us, preparing
from katydid_kernels.gemm import experts as launches
from katydid_kernels.gemm.checking import block_operands, check_block_experts, check_experts, expert_operands
from katydid_kernels.gemm.combine import combine
from katydid_kernels.gemm.experts import ExpertWorkspace, run_experts
from katydid_kernels.gemm.launch import launch_wide
from katydid_kernels.gemm.plan import plan_routes
from katydid_kernels.gemm.tuning import DecodeTile, FewTile, UpTile, down_tile, up_tile
from torch import Tensor

__all__ = ["SHARDS", "experts", "odd_shapes", "tiles"]

QUANTISED_HIDDEN = 1.5e-2


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a layer, and the batches to time."""

    experts: int
    width: int
    hidden: int
    sizes: tuple[int, ...]
    dtype: torch.dtype = E4M3
    of_blocks: bool = False


_ALL = (1, 16, 64, 256, 1024, 4096)
SHARDS = {
    "TP8": Shard(192, 192, 4096, (1, 4, 16, 64, 256, 1024, 4096, 16384)),
    "EP8": Shard(24, 1536, 4096, (16, 64, 128, 1024)),
    "bf16 TP8": Shard(192, 192, 4096, (1, 64, 16384), BF16),
    "TP4": Shard(192, 384, 4096, _ALL),
    "TP2": Shard(192, 768, 4096, _ALL),
    "TP1": Shard(192, 1536, 4096, (16, 256, 4096)),
    "Qwen3-30B-A3B": Shard(128, 768, 2048, _ALL),
    "Qwen3-235B-A22B TP2": Shard(128, 768, 4096, _ALL),
    "blocks EP8": Shard(24, 1536, 4096, (16, 64, 128, 1024), of_blocks=True),
    "blocks Qwen3-30B-A3B": Shard(128, 768, 2048, _ALL, of_blocks=True),
}
# experts, width, tokens, top_k, first expert; hidden size; whether every token also goes to the first expert
ODD_SHAPES = [
    ((5, 192, 37, 2, 0), 512, False),
    ((257, 192, 64, 1, 0), 1024, False),
    ((128, 64, 9, 1, 0), 128, False),
    ((16, 384, 41, 8, 4), 4096, False),
    ((8, 1536, 300, 8, 8), 4096, False),
    ((24, 192, 900, 8, 0), 4096, True),
]
Tile = FewTile | DecodeTile | UpTile


class Batch:
    """One size of one shard: operands, and the call to time."""

    def __init__(
        self, shard: Shard, tokens: int, weights: list[tuple[Tensor, Tensor]], *, token_scales: bool = False
    ) -> None:
        count, hidden, width = weights[0][1].shape
        dtype = weights[0][0].dtype
        self.shard, self.weights = shard, weights
        self.x = torch.randn(tokens, hidden, device="cuda").to(dtype)
        case = (count, width, tokens if shard.of_blocks else 2, TOP_K, 0)
        operands = block_operands(case, hidden) if shard.of_blocks else expert_operands(case, hidden, dtype)
        self.scales = operands[-1]
        if token_scales and not shard.of_blocks and dtype == E4M3:
            self.scales = replace(self.scales, token=torch.ones(tokens, device="cuda"))
        self.router_weights = torch.rand(tokens, TOP_K, device="cuda")
        self.shared = torch.randn(tokens, hidden, device="cuda").bfloat16()
        self.out = torch.empty(tokens, hidden, device="cuda", dtype=BF16)
        self.workspace = ExpertWorkspace.allocate(
            tokens, TOP_K, weights[0][1].shape, dtype, self.x.device, of_blocks=shard.of_blocks
        )
        self.ids = draw_ids(tokens, count)

    def run(self, pair: tuple[Tensor, Tensor], ids: Tensor, tile: Tile | None = None) -> Tensor:
        return run_experts(
            self.x, *pair, self.router_weights, ids, self.out, self.scales, self.workspace,
            shared=self.shared, tile=tile,
        )  # fmt: skip

    def time_us(self, tile: Tile | None = None, replays: int = 15) -> float:
        return median_us([partial(self.run, pair, ids, tile) for ids in self.ids for pair in self.weights], replays)

    def measured(self) -> dict[str, float]:
        """Time, and the experts hit."""
        return {
            "tokens": len(self.x),
            "hit": sum(hit_experts(ids) for ids in self.ids) / len(self.ids),
            "us": self.time_us(),
        }

    def steps(self) -> dict[str, float]:
        """Microseconds of each launch of a batch, by itself."""
        plan, ids, w2 = self.workspace.plan, self.ids[0], self.weights[0][1]
        tile = launches.choose_tile(ids.numel(), len(w2), w2.shape[2], w2.shape[1], w2.dtype)
        plans = [partial(plan_routes, ids, plan, len(w2), tile.tokens)] * 4
        calls: dict[str, Sequence[Callable[[], object]]] = {"plan": plans}
        if isinstance(tile, UpTile):
            up = partial(launches._launch_up, self.x, scales=self.scales, workspace=self.workspace, tile=tile)
            calls["up"] = [partial(up, w13=w13) for w13, _ in self.weights]
            calls["down"] = [
                partial(
                    launch_wide, self.workspace.h, w2, self.workspace.y, down_tile(w2.shape[1], tile.tokens),
                    col_scale=self.scales.down, tiles=plan.tiles, tile_count=plan.tile_count,
                )
                for _, w2 in self.weights
            ]  # fmt: skip
            calls["combine"] = [
                partial(combine, self.workspace.y, plan.slots[: len(ids)], self.router_weights, self.out)
            ] * 2
        return {name: round(median_us(call, 8), 1) for name, call in calls.items()}


def _weights(shard: Shard) -> list[tuple[Tensor, Tensor]]:
    _, w13, w2, *_ = expert_operands((shard.experts, shard.width, 1, TOP_K, 0), shard.hidden, shard.dtype)
    # Two layers, unless one is far beyond L2 already.
    return [(w13, w2)] if w13.numel() > 1e9 else [(w13, w2), (w13.clone(), w2.clone())]


def experts(name: str) -> dict[str, Any]:
    """One of `SHARDS`: its errors, and what was measured."""
    shard = SHARDS[name]
    with preparing():
        weights = _weights(shard)
        batches = [Batch(shard, tokens, weights) for tokens in shard.sizes]
    checked = _checked(shard)
    with compiling():
        for batch in batches:
            batch.run(weights[0], batch.ids[0])
        for case in checked:
            batch = Batch(shard, case[2], weights, token_scales=case[2] % 2 == 1)
            batch.run(weights[0], batch.ids[0])
    errors = []
    for case in checked:
        check = (
            partial(check_block_experts, case, shard.hidden)
            if shard.of_blocks
            else partial(check_experts, case, shard.hidden, shard.dtype)
        )
        with preparing():
            errors.append(typical_error(check, case[2]))
    if max(errors) > QUANTISED_HIDDEN:
        return {"errors": errors, "measured": [], "rows": []}
    measured = []
    for batch in batches:
        with measuring():
            measured.append(batch.measured())
    steps = {}
    if name in ("TP8", "EP8"):
        with measuring():
            steps = {len(batch.x): batch.steps() for batch in batches if len(batch.x) in (64, 256, 1024, 4096, 16384)}
    return {"errors": errors, "steps_us": steps, "measured": measured, "rows": []}


def _checked(shard: Shard) -> list[tuple[int, int, int, int, int]]:
    """A batch for every way through, an odd size (a scale a token) and an even one."""
    few = {1, 3, 64, 2 * shard.experts - 1, 4 * shard.experts + 1, 1000}
    small = {3, 64, 501} if shard.experts * shard.width * shard.hidden > 2e8 else few
    return [(shard.experts, shard.width, tokens, TOP_K, 0) for tokens in sorted(small)]


def _worth(batch: Batch, tile: Tile) -> bool:
    tokens = len(batch.x)
    return tokens <= 6 if isinstance(tile, FewTile) else tokens * TOP_K / batch.shard.experts <= 4 * tile.tokens


def odd_shapes() -> dict[str, Any]:
    """Errors of cases far from the tuned ones, in fp8 and bf16."""
    errors = []
    for dtype in (E4M3, BF16):
        for case, hidden, crowd in ODD_SHAPES:
            with preparing():
                errors.append(check_experts(case, hidden, dtype, crowd=crowd))
    return {"errors": errors, "rows": []}


def tiles(name: str) -> dict[str, Any]:
    """Which tile is best for every size, and where the decode kernel hands over to the grouped GEMMs."""
    shard = SHARDS[name]
    candidates: list[Tile] = [
        FewTile(22, True),
        DecodeTile(8, 64, 2, 11, True),
        DecodeTile(16, 64, 2, 10, True),
        DecodeTile(32, 64, 2, 9, True),
        DecodeTile(64, 64, 2, 8, True),
        DecodeTile(128, 64, 2, 6, True),
        up_tile(0, shard.width, shard.hidden, shard.dtype),
    ]
    with preparing():
        weights = _weights(shard)
        batches = [Batch(shard, tokens, weights) for tokens in shard.sizes if tokens <= 1024]
    pairs = [(batch, tile) for batch in batches for tile in candidates if _worth(batch, tile)]
    with compiling():
        for batch, tile in pairs:
            batch.run(weights[0], batch.ids[0], tile)
    found = {}
    for batch, tile in pairs:
        with measuring():
            found[f"{len(batch.x)} tokens, {tile}"] = round(batch.time_us(tile, 8), 1)
    return {"us": found, "rows": []}
