"""What the attention benchmark runs on: page pools, batches cut from them, and the clock.

A pool holds random pages of one shape; a batch takes its pages from it in random order, the next batch other pages, so
a graph that replays several batches finds L2 cold.  Times are medians of graph replays, in microseconds a call.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from katydid_kernels.decode_attention import DecodeScratch, decode_attention, decode_ctas
from katydid_kernels.decode_plan import decode_plan, decode_plan_static
from katydid_kernels.prefill_attention import prefill_attention, prefill_plan
from torch import Tensor

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
COPY_RATE = 4.27e12
COLD_BYTES = 130e6

MIXES = {
    "32x128+32x4K": [128] * 32 + [4096] * 32,
    "1x64K+7x4K": [65536] + [4096] * 7,
    "1x64K+15x4K": [65536] + [4096] * 15,
    "1x64K+31x4K": [65536] + [4096] * 31,
    "1x128K+31x4K": [131072] + [4096] * 31,
    "2x32K+30x4K": [32768] * 2 + [4096] * 30,
    "1x256K": [262144],
}
BATCHES = {
    "64x512": [512] * 64,
    "64x4K": [4096] * 64,
    "1x16K+15x64": [16384] + [64] * 15,
    "128x8K": [8192] * 128,
    **MIXES,
}


def log_normal_batches(count: int, rows: int = 16, mean: float = 68_000, sigma: float = 1.0) -> dict[str, list[int]]:
    """Batches whose context lengths have the mean and the long tail of agents' traffic, at most 192K."""
    centre = math.log(mean) - sigma**2 / 2
    batches = {}
    for seed in range(count):
        source = random.Random(seed)
        batches[f"log-normal {seed}"] = [
            min(196608, max(1, round(source.lognormvariate(centre, sigma)))) for _ in range(rows)
        ]
    return batches


def dequantisation(q: Tensor) -> dict[str, Any]:
    """The scales that e4m3 queries and pages come with; none for wider ones."""
    if q.dtype != FP8:
        return {}
    one = torch.ones(1, device="cuda")
    return {"q_scale": torch.rand(q.shape[:-1], device="cuda") + 0.5, "k_scale": one, "v_scale": one}


def uniform_twin(lens: list[int]) -> list[int]:
    """A batch of equal lengths near 4K with as many tokens as `lens`."""
    rows = max(1, round(sum(lens) / 4096))
    return [sum(lens) // rows] * rows


@dataclass(frozen=True)
class Pool:
    """Random pages; `free` is their shuffled order, from which batches are cut."""

    k: Tensor
    v: Tensor
    free: Tensor

    @staticmethod
    def make(nbytes: float, kv_heads: int, dtype: torch.dtype, head_dim: int = 128) -> Pool:
        page = 2 * 64 * kv_heads * head_dim * (1 if dtype == FP8 else 2)
        pages = int(nbytes // page)
        k = torch.randn(pages, kv_heads, 64, head_dim, device="cuda", dtype=BF16).to(dtype)
        v = torch.randn(pages, kv_heads, head_dim, 64, device="cuda", dtype=BF16).to(dtype)
        return Pool(k, v, torch.randperm(pages, device="cuda").int())

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    def kv_bytes(self, tokens: int) -> int:
        return 2 * tokens * self.kv_heads * self.k.shape[3] * self.k.element_size()

    def tables(self, lens: list[int]) -> list[Tensor]:
        """Block tables of as many disjoint batches as make L2 cold, or as the pool has pages for."""
        counts = torch.tensor([-(-n // 64) for n in lens])
        each = int(counts.sum())
        sets = max(1, min(len(self.free) // each, 24, math.ceil(COLD_BYTES / self.kv_bytes(sum(lens))) + 1))
        inside = (torch.arange(int(counts.max()))[None] < counts[:, None]).cuda()
        tables = []
        for i in range(sets):
            table = torch.zeros(inside.shape, dtype=torch.int32, device="cuda")
            table[inside] = self.free[i * each : (i + 1) * each]
            tables.append(table)
        return tables


@dataclass(frozen=True)
class Decode:
    """One decode batch over a pool: `heads` query heads in all, `q_len` new tokens a row."""

    pool: Pool
    lens: list[int]
    heads: int
    q_len: int = 1

    def query(self) -> tuple[Tensor, dict[str, Any]]:
        shape = (len(self.lens), self.q_len, self.heads)
        q = torch.randn(*shape, self.pool.k.shape[3], device="cuda", dtype=BF16).to(self.pool.k.dtype)
        return q, dequantisation(q)

    def calls(self, *, overlap: bool, splits: int | None = None) -> list[Callable[[], object]]:
        """One call a block table; with `splits` over the static plan instead of the dealt one."""
        q, scale = self.query()
        lens = torch.tensor(self.lens, dtype=torch.int32, device="cuda")
        kv_heads, ctas, tables = self.pool.kv_heads, decode_ctas(q.device), self.pool.tables(self.lens)
        if splits is None:
            plans = [decode_plan(lens, kv_heads, ctas=ctas, q_len=self.q_len, block_table=table) for table in tables]
        else:
            plans = [decode_plan_static(lens, kv_heads, splits, q_len=self.q_len)] * len(tables)
        scratch = DecodeScratch.allocate(len(plans[0]), self.q_len, self.heads // kv_heads, q.shape[3], q.device)
        fixed: dict[str, Any] = {"scratch": scratch, "overlap": overlap, **scale}
        fixed["out"] = torch.empty_like(q, dtype=BF16)
        fixed["lse"] = torch.empty(q.shape[:3], device="cuda")
        return [
            partial(decode_attention, q, self.pool.k, self.pool.v, table, lens, plan=plan, **fixed)
            for table, plan in zip(tables, plans, strict=True)
        ]

    def time(self, *, overlap: bool = True, splits: int | None = None) -> float:
        return time_graph(self.calls(overlap=overlap, splits=splits))

    def bandwidth(self, microseconds: float) -> float:
        """Share of the measured copy rate at which the KV bytes went by."""
        return self.pool.kv_bytes(sum(self.lens)) / (microseconds * 1e-6) / COPY_RATE


@dataclass(frozen=True)
class Prefill:
    """`new` tokens a row after `prefix` cached ones."""

    pool: Pool
    new: int
    prefix: int
    heads: int

    def query(self) -> tuple[Tensor, dict[str, Any]]:
        shape = (self.new, self.heads)
        q = torch.randn(*shape, self.pool.k.shape[3], device="cuda", dtype=BF16).to(self.pool.k.dtype)
        return q, dequantisation(q)

    def calls(self) -> list[Callable[[], object]]:
        q, scale = self.query()
        lens = torch.tensor([self.new + self.prefix], dtype=torch.int32, device="cuda")
        cu = torch.tensor([0, self.new], dtype=torch.int32, device="cuda")
        fixed: dict[str, Any] = {"plan": prefill_plan(lens, cu, self.new), **scale}
        fixed["out"] = torch.empty_like(q, dtype=BF16)
        fixed["lse"] = torch.empty(q.shape[:2], device="cuda")
        return [
            partial(prefill_attention, q, self.pool.k, self.pool.v, table, lens, cu, **fixed)
            for table in self.pool.tables([self.new + self.prefix])[:2]
        ]

    def time(self) -> float:
        return time_graph(self.calls(), replays=7, at_least=2)

    def tflops(self, microseconds: float) -> float:
        pairs = self.new * self.prefix + self.new * (self.new + 1) / 2
        return 4 * self.pool.k.shape[3] * self.heads * pairs / microseconds * 1e-6


def time_graph(
    calls: Sequence[Callable[[], object]], replays: int = 20, warm_s: float = 0.04, at_least: int = 16
) -> float:
    """Microseconds a call: a graph of all calls, median of `replays` replays once the clocks are up (`warm_s`).

    The graph's own launch, some 8 us, is divided by its calls: they are repeated until there are `at_least` so many.
    """
    calls = [*calls] * -(-at_least // len(calls))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    ready = time.monotonic() + warm_s
    while time.monotonic() < ready:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / len(calls))
    return sorted(times)[replays // 2]
