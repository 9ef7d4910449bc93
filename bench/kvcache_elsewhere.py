"""Bars of the KV cache that other programs measure: their rows as `bench/kvcache.py` keeps them, with their source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["elsewhere"]

RESULTS = Path(__file__).resolve().parent / "results"
TRACE_SHARES = ("1%", "3%", "10%", "30%")
LINK_BAR = 45

Row = dict[str, Any]


def elsewhere() -> list[Row]:
    """The trace's hit rates (cache_replay.json), and blocks between the arena and a GPU's pages: by the kernels alone
    (fused.json), and by the engine's way (kvcache_gpu.json), whose other rows come along."""
    replayed = {row["figure"]: row for row in _rows("cache_replay.json")}
    traces = [
        (f"replay.lru.adaptive.{share}", f"trace replay, memory {share} of unique blocks") for share in TRACE_SHARES
    ]
    moved = {row["figure"]: row for row in _rows("fused.json")}
    ways = [("kv_unpack", "arena to GPU pages"), ("kv_pack", "GPU pages to arena")]
    rows = [_row(replayed[name], told, replayed[name]["bar"], "cache_replay.json") for name, told in traces]
    for kernel, told in ways:
        row = moved[f"{kernel}, 8 of 8 heads, with checksum"]
        rows.append(_row(row, f"{told}, checksums on, H200", LINK_BAR, "fused.json"))
    kept = ("figure", "value", "unit", "bar", "met", "commit", "note")
    source = {"source": "bench/results/kvcache_gpu.json"}
    return rows + [{name: row[name] for name in kept if name in row} | source for row in _rows("kvcache_gpu.json")]


def _rows(name: str) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / name).read_text())["rows"]
    return rows


def _row(row: Row, figure: str, bar: float, source: str) -> Row:
    value = row["value"]
    return {
        "figure": figure,
        "value": value,
        "unit": row["unit"],
        "bar": bar,
        "met": value >= bar,
        "source": f"bench/results/{source}",
    }
