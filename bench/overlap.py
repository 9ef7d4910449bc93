"""What is sent, and what moves, beside a step: one rank of eight on one GPU, over a link that is emulated.

    python bench/overlap.py                       writes bench/results/overlap.json
    python bench/overlap.py --parts decode        one of them; rows of others stay

Parts:

    prefill      32K tokens under a split residual in two parts, as a graph, with what is sent taking its time and not,
                 and op by op
    decode       steps of data-parallel attention with shared experts, in one part and in two, as graphs
    rebalance    such steps while redundant experts move, and while they do not

The link is the one of `planning/h200.json`: copies to the host's memory, by a copy engine, that take as long. With
`--far 1` they go to the memory of GPU 1 instead, over the link there is; with `--far 0` they stay within GPU 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from katydid_engine.collectives import Settled
from katydid_engine.eplb.rebalancer import Rebalancer
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.kv_cache import KvCache
from katydid_engine.parallel import ParallelPlan
from katydid_engine.planning.known_models import KNOWN_MODELS
from katydid_engine.planning.measured import measured
from katydid_engine.rank_slice.build import RankSlice, SliceOptions, build_slice, fill_pages
from katydid_engine.rank_slice.emulated_link import EmulatedLink
from torch import Tensor

ROOT = Path(__file__).parents[1]
PARTS = ("prefill", "decode", "rebalance")
PROMPT = 32_768
PREFILL = {"tp8,sp,fp8": (0.45, 24.5), "tp8,sp,ep8,fp8": (0.40, 24.5)}
DECODE, ROWS, CONTEXT = "dp8,ep8", (128, 256, 512), 1024
REBALANCE, MOVING_STEPS = "dp8,ep8+32", 96
Rows = list[dict[str, Any]]


class Bench:
    """Writes ``out`` with every row: what was measured stays whatever comes behind it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device("cuda", options.gpu)
        self.far = None if options.far is None else torch.device("cuda", options.far)
        self.repeats, self.sizes = options.repeats, options.sizes
        self.plans = {plan: PREFILL[plan] for plan in options.plans}
        self.links = measured("h200")["nvlink_bytes_per_s"]
        self.rows: Rows = []
        self._out: Path = options.out
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        self._record = {
            "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__},
            "commit": os.environ.get("KATYDID_COMMIT") or head.stdout.strip(),
            "command": " ".join(sys.argv),
        }
        self._old: Rows = json.loads(self._out.read_text())["rows"] if self._out.exists() else []

    def note(self, figure: str, value: float, unit: str, bar: float | None = None, *, most: bool = True) -> None:
        met = None if bar is None else bool(value <= bar if most else value >= bar)
        none = {"floor": None, "peer": None, "peer_value": None}
        row = {"figure": figure, "value": round(value, 5), "unit": unit, **none, "bar": bar, "met": met}
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        new = {row["figure"] for row in self.rows}
        rows = [*(row for row in self._old if row["figure"] not in new), *self.rows]
        self._out.write_text(json.dumps({**self._record, "rows": rows}, indent=1) + "\n")

    def slice_of(self, plan: str, layers: int, *, micro_batches: int, dense_first: bool = True) -> RankSlice:
        hy3 = KNOWN_MODELS["hy3"]
        sparse = hy3.sparse_layers[:layers] if dense_first else (True,) * layers
        config = replace(hy3, num_layers=layers, sparse_layers=sparse, num_mtp_layers=0)
        return build_slice(
            SliceOptions(
                config,
                ParallelPlan.parse(plan),
                self.device,
                micro_batches=micro_batches,
                most_tokens=PROMPT,
                links=self.links,
                far=self.far,
            )
        )

    def prefill(self, layers: int) -> None:
        whole = tp8_seconds() * layers / 80
        for plan, (most_s, least_percent) in self.plans.items():
            made, name = self.slice_of(plan, layers, micro_batches=2), in_two_parts(plan, layers)
            link, cache = made.link, made.model.new_kv_cache(PROMPT // 64)
            assert link is not None
            run = TokenRun(made.token_ids(PROMPT), 0, range(PROMPT // 64))
            work = partial(made.model.forward, ForwardBatch.pack([run], device=self.device), cache)
            both = seconds(captured(work), self.repeats)
            sending = link.carried / 2 / self.links  # the pass that was captured went before
            self.note(f"{name}: with transfers", both, "s", most_s * layers / 80)
            lower = 100 * (1 - both / whole)
            self.note(f"{name}: with transfers, lower than tp8", lower, "%", least_percent, most=False)
            self.note(f"{name}: with transfers, op by op", seconds(work, 1, tries=1), "s")
            free()
            link.on = False
            alone = seconds(captured(work), self.repeats)
            self.note(f"{name}: computing", alone, "s")
            self.note(f"{name}: what is sent takes", sending, "s")
            self.note(f"{name}: of the time for sending, seen", 100 * (both - alone) / sending, "%", 15.0)
            del made, link, cache, work
            free()

    def decode(self, layers: int) -> None:
        took: dict[tuple[int, int, bool], float] = {}
        sending: dict[int, float] = {}
        for parts in (1, 2):
            made = self.slice_of(DECODE, layers, micro_batches=parts, dense_first=False)
            link = made.link
            assert link is not None
            for rows in self.sizes:
                batch, cache = decodes(made, rows)
                for on in (False, True):
                    link.on, link.carried = on, 0
                    made.model.forward(batch, cache)
                    sending.setdefault(rows, link.carried / self.links)
                    step = captured(partial(made.model.forward, batch, cache))
                    took[rows, parts, on] = seconds(step, 10 * self.repeats)
                    del step
                del batch, cache
                free()
            del made, link
            free()
        for rows in self.sizes:
            name = f"decode of {rows} rows a rank, {DECODE}, {layers} layers"
            for parts in (1, 2):
                self.note(f"{name}: {parts} micro-batches, nothing sent", 1e3 * took[rows, parts, False], "ms")
                self.note(f"{name}: {parts} micro-batches, with transfers", 1e3 * took[rows, parts, True], "ms")
            seen = 100 * (took[rows, 2, True] - took[rows, 2, False]) / sending[rows]
            self.note(f"{name}: of the time for sending, seen with two micro-batches", seen, "%", 15.0)
            self.note(f"{name}: two micro-batches over one", took[rows, 2, True] / took[rows, 1, True], "x")

    def rebalance(self, layers: int) -> None:
        made = self.slice_of(REBALANCE, layers, micro_batches=1)
        assert made.link is not None
        made.experts.link = made.tensor.link = None
        batch, cache = decodes(made, 64)
        step = captured(partial(made.model.forward, batch, cache))
        balancer = Rebalancer(made.model.dispatched, Movers(made.link), interval=40)
        still: list[float] = []
        moving: list[float] = []
        balancer.connect()
        skew(made)
        # Every round as ranks in lockstep have it: what is due between two passes, a pass, and what is due beside it.
        for _ in range(60 + 5 * layers):
            torch.cuda.synchronize()
            started = time.perf_counter()
            under_way = balancer.state.layers_moved < balancer.state.layers
            balancer.agreed([balancer.progress()], passing=True)
            step()
            balancer.meanwhile()
            torch.cuda.synchronize()
            under_way = under_way or balancer.state.layers_moved < balancer.state.layers
            (moving if under_way else still).append(1e3 * (time.perf_counter() - started))
            if balancer.state.finished or len(moving) == MOVING_STEPS:
                break
        usual, name = float(np.median(still[5:])), f"rebalance, {REBALANCE}, 64 rows a rank, {layers} layers"
        self.note(f"{name}: layers whose experts moved meanwhile", balancer.state.layers_moved, "")
        self.note(f"{name}: the usual step", usual, "ms")
        self.note(f"{name}: a step while they move, median, over the usual one", over(moving, 50, usual), "%", 5.0)
        self.note(f"{name}: the same, 99th percentile", over(moving, 99, usual), "%", 5.0)
        self.note(f"{name}: the longest step of all over the usual one", over(moving, 100, usual), "%")
        self.note(f"{name}: steps of the usual kind, 99th percentile over the median", over(still[5:], 99, usual), "%")


class Movers:
    """Other ranks that hold experts: what this one would send them goes over the link, and comes back as theirs."""

    rank, size = 0, 8

    def __init__(self, link: EmulatedLink) -> None:
        self._link = link

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.size, dim)

    def gather(self, x: Tensor) -> Settled:
        return Settled(self.all_gather(x, 0))

    def all_to_all(
        self,
        x: Tensor,
        send: Sequence[int] | None = None,  # noqa: ARG002
        receive: Sequence[int] | None = None,  # noqa: ARG002
        out: Tensor | None = None,
    ) -> Coming | Settled:
        return Settled(x) if out is None else Coming(self._link, x, out)


class Coming:
    def __init__(self, link: EmulatedLink, sent: Tensor, out: Tensor) -> None:
        self._over, self._out = torch.cuda.Event(), out  # type: ignore[no-untyped-call]
        link.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(link.stream):
            link.carry(out.nbytes)
            for first in range(0, len(out), max(1, len(sent))):
                part = out[first : first + len(sent)]
                part.copy_(sent[: len(part)])
            self._over.record()

    def done(self) -> bool:
        return bool(self._over.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self._over)
        return self._out


def in_two_parts(plan: str, layers: int) -> str:
    return f"prefill of {PROMPT} tokens, {plan}, {layers} layers, two parts"


def decodes(made: RankSlice, rows: int) -> tuple[ForwardBatch, KvCache]:
    """A step of so many sequences with ``CONTEXT`` tokens behind them, in the exchange's fixed form."""
    each = -(-(CONTEXT + 1) // 64)
    cache = made.model.new_kv_cache(rows * each)
    fill_pages(cache)
    ids = made.token_ids(rows)
    runs = [TokenRun([ids[row]], CONTEXT, range(row * each, (row + 1) * each)) for row in range(rows)]
    made.model.exchange_rows(made.model.rows_at_once(rows, 1))
    return ForwardBatch.pack(runs, num_decodes=rows, device=made.model.device), cache


def skew(made: RankSlice) -> None:
    """Counts as of a trace whose experts are chosen by Zipf's law, exponent 1.2, in another order in every layer."""
    for index, block in enumerate(made.model.dispatched):
        counts = 1e6 / (torch.arange(len(block.table.chosen)) + 1.0) ** 1.2
        order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(index))
        block.table.chosen.copy_(counts[order].long())


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """``work`` as a graph, done once before."""
    with torch.inference_mode():
        work()
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            work()
            graph.capture_end()
    return graph.replay


def seconds(step: Callable[[], object], repeats: int, tries: int = 3) -> float:
    """Of a step, one after the other without a pause; the best of ``tries``."""
    best = float("inf")
    for _ in range(tries):
        step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - started) / repeats)
    return best


def over(times: Sequence[float], percentile: float, usual: float) -> float:
    return 100 * (float(np.percentile(times, percentile)) / usual - 1)


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def tp8_seconds() -> float:
    """A prompt under plain TP, its transfers by the link model, as `bench/results/slice.json` has it."""
    rows = json.loads((ROOT / "bench" / "results" / "slice.json").read_text())["rows"]
    start = f"tp8 rank 0, fp8, fp8 KV: prefill of {PROMPT} tokens"
    row = next(row for row in rows if row["figure"].startswith(start) and "blocks" not in row["figure"])
    return float(row["value"]) + float(row["links_modelled_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--plans", nargs="+", choices=list(PREFILL), default=list(PREFILL), help="of prefill")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(ROWS), help="rows a rank of decode")
    parser.add_argument("--layers", type=int, help="by default 80, and 12 for decode")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--far", type=int, help="GPU that what is sent is copied to")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "overlap.json")
    options = parser.parse_args()
    bench = Bench(options)
    torch.cuda.set_device(bench.device)
    for part in options.parts:
        getattr(bench, part)(options.layers or (12 if part == "decode" else 80))


if __name__ == "__main__":
    main()
