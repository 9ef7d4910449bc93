"""Measures Stem's selection and block-sparse prefill against our own dense prefill on one Hopper GPU.

    PYTHONPATH=kernels:bench/kernels python bench/kernels/sparse_prefill.py --out bench/results

A prompt's chunks of 8,192 tokens over what came before; times of a whole prompt are sums over its chunks. Keys are
random: which blocks are kept does not matter for the time, only how many. Correctness is
`tests/kernels/test_{stem_select,block_sparse_prefill}.py`; one chunk of each kind is compared here before it is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_cases import BF16, FP8, Pool, Prefill, time_graph
from gemm_timing import BF16_TFLOPS, FP8_TFLOPS, Row, measuring, preparing, row
from katydid_kernels import (
    SparsePlan,
    StemRule,
    block_sparse_prefill,
    block_sparse_prefill_reference,
    sparse_plan,
    stem_select,
    stem_select_reference,
)
from results_file import replace_rows
from torch import Tensor

CHUNK, HEAD_DIM = 8192, 128
LIMITS = {FP8: 3e-2, BF16: 4e-3}
LENGTHS = (32768, 65536, 131072, 196608)
# (name, dtype, query heads, kv heads): the slice of one of eight ranks, and a whole layer.
SLICE, WHOLE = ("fp8 8/1", FP8, 8, 1), ("fp8 64/8", FP8, 64, 8)


class Chunk:
    """The last ``CHUNK`` tokens of ``length``, of a prompt of ``prompt`` tokens."""

    def __init__(self, pool: Pool, heads: int, length: int, prompt: int, rule: StemRule) -> None:
        self.pool, self.heads, self.length = pool, heads, length
        self.new = min(CHUNK, length)
        self.dense = Prefill(pool, self.new, length - self.new, heads)
        self.q, self.scales = self.dense.query()
        self.lens = torch.tensor([length], dtype=torch.int32, device="cuda")
        self.plan: SparsePlan = sparse_plan(rule, [self.new], [length], [prompt], "cuda")
        self.tables = pool.tables([length])[:2]

    def select(self, table: Tensor) -> Tensor:
        return stem_select(self.q, self.pool.k, self.pool.v, table, self.lens, self.plan, **self.scales)

    def once(self) -> None:
        """Compiles what is timed."""
        self.dense.calls()[0]()
        self.attend(self.tables[0], self.select(self.tables[0]))

    def attend(self, table: Tensor, blocks: Tensor, out: Tensor | None = None) -> Tensor:
        return block_sparse_prefill(
            self.q, self.pool.k, self.pool.v, table, self.lens, self.plan, blocks, out=out, **self.scales
        )

    def time_dense(self) -> float:
        return time_graph(self.dense.calls(), replays=7, at_least=self.calls())

    def time_select(self) -> float:
        return time_graph([partial(self.select, table) for table in self.tables], replays=7, at_least=16)

    def time_sparse(self) -> float:
        lists = [self.select(table) for table in self.tables]
        out = torch.empty_like(self.q, dtype=BF16)
        calls = [partial(self.attend, table, blocks, out) for table, blocks in zip(self.tables, lists, strict=True)]
        return time_graph(calls, replays=7, at_least=self.calls())

    def calls(self) -> int:
        """Of a graph: of short ones so many that its own launch is no part of a call's time."""
        return 16 if self.length <= 65536 else 2

    def pairs(self) -> tuple[int, int]:
        """(kept, visible) pairs of blocks."""
        records = self.plan.in_order.tolist()
        return sum(record[5] for record in records), sum(record[3] // 128 + 1 for record in records)

    def wrong(self) -> str | None:
        table = self.tables[0]
        lists = self.select(table)
        exact = stem_select_reference(self.q, self.pool.k, self.pool.v, table, self.plan, **self.scales)
        kept, _ = self.pairs()
        records = self.plan.in_order.tolist()
        differing = sum(
            len(set(a[: record[5]]) - set(b[: record[5]]))
            for record, x, y in zip(records, lists.tolist(), exact.tolist(), strict=True)
            for a, b in zip(x, y, strict=True)
        )
        # Pooled sums in bf16 turn scores that are equal within half a per cent.
        if differing > 2e-2 * kept * self.heads:
            return f"{differing} of {kept * self.heads} blocks differ"
        found = self.attend(table, lists)
        expected = block_sparse_prefill_reference(
            self.q, self.pool.k, self.pool.v, table, self.plan, lists, dtype=torch.float64, **self.scales
        )
        error = ((found.double() - expected).norm() / expected.norm()).item()
        return None if error <= LIMITS[self.pool.k.dtype] else f"relative error {error:.2e}"


def whole_prompt(pool: Pool, heads: int, prompt: int, rule: StemRule) -> tuple[float, float, float, float]:
    """Microseconds of dense attention, sparse attention and selection, and the share of pairs kept, over all chunks.

    Five chunks are timed and the others lie on the line between them: all three grow linearly along a prompt, but for
    its last chunk, which has the tail.
    """
    ends = list(range(CHUNK, prompt + 1, CHUNK))
    timed = sorted({ends[0], ends[len(ends) // 3], ends[2 * len(ends) // 3], ends[-2], ends[-1]})
    points = []
    for end in timed:
        chunk = Chunk(pool, heads, end, prompt, rule)
        chunk.once()
        sparse = bool(chunk.plan.sparse_rows)
        with measuring():
            dense = chunk.time_dense()
            points.append((dense, chunk.time_sparse() if sparse else dense, chunk.time_select() if sparse else 0.0))
    sums = [sum(_between(timed, [point[i] for point in points], end) for end in ends) for i in range(3)]
    kept, visible = zip(*(Chunk(pool, heads, end, prompt, rule).pairs() for end in ends), strict=True)
    return sums[0], sums[1], sums[2], sum(kept) / sum(visible)


def _between(xs: list[int], ys: list[float], x: int) -> float:
    for (x0, y0), (x1, y1) in zip(zip(xs, ys, strict=True), list(zip(xs, ys, strict=True))[1:], strict=False):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return ys[-1]


def rows_of(
    name: str, dtype: torch.dtype, heads: int, kv_heads: int, lengths: tuple[int, ...], tail: int = 4
) -> list[Row]:
    """With the engine's default of four blocks of queries at the end that keep everything, or another ``tail``."""
    pool = Pool.make(2 * max(lengths) * kv_heads * HEAD_DIM * dtype.itemsize * 2.2, kv_heads, dtype)
    rule, rows = StemRule(budget=0.25, tail=tail), []
    with preparing():
        wrong = Chunk(pool, heads, min(lengths), min(lengths), rule).wrong()
    if wrong is not None:
        return [row(f"sparse prefill {name}: {wrong}", 0, "us", 0, None, None, None)]
    rate = FP8_TFLOPS if dtype == FP8 else BF16_TFLOPS
    for length in lengths:
        dense, sparse, select, kept = whole_prompt(pool, heads, length, rule)
        gain = dense / (sparse + select)
        case = f"prompt of {length // 1024}K, {name}, 25 % budget" + ("" if tail == 4 else f", tail of {tail}")
        floor = 1e-6 * 2 * HEAD_DIM * heads * length**2 * kept / rate
        bar = 3.4 if length == 131072 and dtype == FP8 else None
        share_bar = 80 if length in (32768, 65536) and dtype == FP8 else None
        rows += [
            row(f"{case}: dense attention", dense, "us", floor / kept, None, None, None),
            row(f"{case}: sparse attention and selection", sparse + select, "us", floor, None, None, None),
            row(f"{case}: times faster than dense", gain, "x", 1 / kept, bar, "dense, us", dense),
            row(f"{case}: share of the ideal", 100 * gain * kept, "%", 100, share_bar, None, None),
            row(f"{case}: selection over dense attention", 100 * select / dense, "% (at most)", 0, None, None, None),
        ]
        rows[-1]["bar"], rows[-1]["met"] = 3, 100 * select / dense <= 3
        if length == 196608 and heads == 8:
            figure = f"{case}: 80 layers, seconds"
            rows.append(row(figure, 80e-6 * (sparse + select), "s", 80e-6 * floor, None, "dense, s", 80e-6 * dense))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--whole", action="store_true", help="64 query and 8 kv heads too: longer")
    arguments = parser.parse_args()
    os.environ.setdefault("GEMM_BENCH_LOCK", tempfile.mkstemp()[1])
    torch.manual_seed(0)
    cases: list[tuple[Any, ...]] = [(*SLICE, LENGTHS), (*SLICE, LENGTHS[2:3], 0), ("bf16 8/1", BF16, 8, 1, LENGTHS[:3])]
    if arguments.whole:
        cases.append((*WHOLE, LENGTHS[1:3]))
    rows: list[Row] = []
    for case in cases:
        for found in rows_of(*case):
            print(json.dumps(found), flush=True)
            rows.append(found)
        replace_rows(arguments.out / "fused.json", rows, "sparse_prefill.py")


if __name__ == "__main__":
    main()
