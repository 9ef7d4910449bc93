"""What was measured of routed experts as rows against floors, bars and the best of the peers of the same run."""

from __future__ import annotations

import math
from typing import Any

import torch
from expert_draws import TOP_K
from gemm_timing import BF16_TFLOPS, COPY_TB_PER_S, E4M3, FP8_TFLOPS, Row, row
from moe_cases import SHARDS

__all__ = ["moe_rows"]

BARS = {
    ("TP8", 1): ("us", 12), ("TP8", 16): ("%", 85), ("TP8", 64): ("%", 85), ("TP8", 256): ("%", 85),
    ("TP8", 4096): ("TFLOP/s", 520), ("TP8", 16384): ("TFLOP/s", 600),
    ("EP8", 16): ("%", 88), ("EP8", 64): ("%", 88), ("EP8", 128): ("%", 88), ("EP8", 1024): ("TFLOP/s", 950),
    ("bf16 TP8", 64): ("%", 85), ("bf16 TP8", 16384): ("TFLOP/s", 600),
}  # fmt: skip
# Parts of a run that time a peer, and its name.
PEERS = {"triton": "vLLM Triton, tuned", "cutlass": "vLLM CUTLASS"}
# Microseconds of hpc-ops 6e2eced on this GPU, measured before by the same method; not in the run.
HPC_OPS = {
    ("TP8", 1): 30.8, ("TP8", 4): 41.3, ("TP8", 16): 71.1, ("TP8", 64): 134.0, ("TP8", 256): 148.0,
    ("TP8", 1024): 186.0, ("TP8", 4096): 485.0, ("TP8", 16384): 1708.0,
    ("EP8", 16): 133.0, ("EP8", 64): 139.0, ("EP8", 1024): 521.0,
}  # fmt: skip


def moe_rows(found: dict[str, dict[str, Any]]) -> list[Row]:
    """Rows of all shards in the parts `found`, then how much faster than the peers they are."""
    rows, ratios, with_hpc = [], [], []
    for shard in SHARDS:
        for case in found.get(f"experts {shard}", {}).get("measured", []):
            key = (shard, case["tokens"])
            peer, peer_us = _best_peer(found, *key)
            rows += _rows(key, case, *(_products_alone(found, *key) if peer is None else (peer, peer_us)))
            if peer_us is not None:
                ratios.append(peer_us / case["us"])
                with_hpc.append(min(peer_us, HPC_OPS.get(key, peer_us)) / case["us"])
    if ratios:
        name = f"fused MoE fp8, {len(ratios)} sizes: times as fast as the best peer, geometric mean"
        rows.append(row(name, _mean(ratios), "x", 1, 1.4, "best tuned peer of the run", 1))
        slowest = min(ratios)
        rows.append(row("... the least of them", slowest, "x", 1, 1.0, "best tuned peer of the run", 1))
        rows.append(row("... beside hpc-ops too, geometric mean", _mean(with_hpc), "x", 1, None, "measured earlier", 1))
    return rows


def _mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _best_peer(found: dict[str, dict[str, Any]], shard: str, tokens: int) -> tuple[str | None, float | None]:
    times = {
        name: found.get(f"{part} {shard}", {}).get("us", {}).get(str(tokens)) for part, name in PEERS.items()
    }  # fmt: skip
    there = {name: us for name, us in times.items() if us is not None}
    if not there:
        return None, None
    best = min(there, key=lambda name: there[name])
    return best, there[best]


def _products_alone(found: dict[str, dict[str, Any]], shard: str, tokens: int) -> tuple[str | None, float | None]:
    """DeepGEMM's two products of this size, without the rest of the layer: beside ours, but no peer of it."""
    products = found.get("deepgemm", {})
    if (shard, tokens) != ("blocks EP8", 1024) or "down" not in products:
        return None, None
    return "DeepGEMM, the two products alone", products["gate-up"]["us"] + products["down"]["us"]


def _rows(key: tuple[str, int], case: dict[str, float], peer: str | None, peer_us: float | None) -> list[Row]:
    shard, us = SHARDS[key[0]], case["us"]
    itemsize = torch.empty((), dtype=shard.dtype).element_size()
    byte_us = case["hit"] * 3 * shard.width * shard.hidden * itemsize / COPY_TB_PER_S * 1e-6
    tera = 6e-6 * case["tokens"] * TOP_K * shard.width * shard.hidden
    floor = max(byte_us, tera / (FP8_TFLOPS if shard.dtype == E4M3 else BF16_TFLOPS))
    unit, bar = BARS.get(key, ("us", None))
    name = f"fused MoE {key[0]} {key[1]} tokens, {case['hit']:.0f} of {shard.experts} experts hit"
    rows = [row(name, us, "us", floor, bar if unit == "us" else None, peer, peer_us)]
    if unit == "%":
        theirs = peer_us and 100 * byte_us / peer_us
        rows.append(row(f"{name}: share of copy bandwidth", 100 * byte_us / us, "%", 100, bar, peer, theirs))
    if unit == "TFLOP/s":
        rows.append(row(f"{name}: rate", tera / us, unit, tera / floor, bar, peer, peer_us and tera / peer_us))
    return rows
