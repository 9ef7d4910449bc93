"""Decode steps of a rank slice through the engine's runner: graphs, steps ahead, drafts; what is idle between them.

    PYTHONPATH=kernels:services/engine:services/runtime:. python3 bench/engine_steps.py

The slice is the first of Hy3's 8 TP ranks, 80 layers and a draft layer in fp8 over fp8 pages, with synthetic weights. A
share of 0.7 of the drafts counts as right, for such weights predict nothing. Rows sample with top-k and top-p.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from katydid_engine.decode_steps import Captured, DecodeSteps, Uncaptured
from katydid_engine.parallel import ParallelPlan
from katydid_engine.plan import Run, SampleRow, Start, StepPlan
from katydid_engine.planning.known_models import KNOWN_MODELS
from katydid_engine.rank_slice.build import RankSlice, SliceOptions, build_slice, fill_pages
from katydid_engine.request import Sampling
from katydid_engine.runner import Runner
from katydid_engine.step_outcome import Launched
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
AGREEMENT = 0.7
# Rows, context and steps ahead of what is timed.
PLAIN = ((1, 8192), (16, 4096), (32, 4096), (64, 4096))
DRAFTED = ((1, 8192), (32, 4096))
_UNKNOWN, _NO_PAGES = array("I", (0,)), array("I")


class Decoding:
    """Rows that decode step by step with ``depth`` drafts, each in pages of its own as far as there are so many."""

    _next = 1

    def __init__(self, runner: Runner, pages: int, rows: int, context: int, depth: int, *, ahead: bool) -> None:
        self._runner, self._depth, self._ahead = runner, depth, ahead
        self.rows, self.tokens = rows, 0
        self._sequences = range(Decoding._next, Decoding._next + rows)
        Decoding._next += rows
        each = self._pages = min(-(-context // 64) + 16, pages)
        sampling = Sampling(temperature=0.8, top_p=0.95, top_k=40, seed=7, ignore_eos=True)
        starts = tuple(Start(sequence, sampling, context, _UNKNOWN) for sequence in self._sequences)
        runs = tuple(
            Run(
                sequence,
                context - 1,
                array("I", (7 + row,)),
                0,
                array("I", [(row * each + page) % pages for page in range(each)]),
            )
            for row, sequence in enumerate(self._sequences)
        )
        self._samples = tuple(SampleRow(row, 0) for row in range(rows))
        self._known = [context] * rows
        self._newest = [0] * rows
        self._under_way: deque[Launched] = deque()
        self._launch(runs, 1, starts)
        self._take()

    def steps(self, count: int) -> float:
        """Seconds of a step."""
        self.tokens = 0
        started = time.perf_counter()
        for _ in range(count):
            self._step()
        while self._under_way:
            self._take()
        return (time.perf_counter() - started) / count

    def end(self) -> None:
        self._runner.run(StepPlan(0, ends=tuple(self._sequences)))

    def _step(self) -> None:
        width = 1 + self._depth
        ahead = bool(self._under_way)
        coming = width * len(self._under_way)
        self._launch(
            tuple(
                Run(
                    sequence,
                    known + coming - 1,
                    _UNKNOWN if ahead else array("I", (newest,)),
                    self._pages,
                    _NO_PAGES,
                    ahead=ahead,
                )
                for sequence, known, newest in zip(self._sequences, self._known, self._newest, strict=True)
            ),
            width,
        )
        if len(self._under_way) > self._ahead:
            self._take()

    def _launch(self, runs: tuple[Run, ...], width: int, starts: tuple[Start, ...] = ()) -> None:
        plan = StepPlan(
            0,
            starts=starts,
            runs=runs,
            num_decodes=self.rows,
            decode_q_len=width,
            samples=self._samples,
            drafts=self._depth,
        )
        self._under_way.append(self._runner.launch(plan))

    def _take(self) -> None:
        for row, tokens in enumerate(self._under_way.popleft().output().tokens):
            self._known[row] += len(tokens)
            self._newest[row] = tokens[-1]
            self.tokens += len(tokens)


class Bench:
    """A slice behind a runner, whose decodes are graphs."""

    def __init__(self, rank_slice: RankSlice, pages: int) -> None:
        self._slice, self._pages = rank_slice, pages
        self._cuda = rank_slice.model.device.type == "cuda"
        self._runner = Runner(rank_slice.model, pages, collectives=rank_slice.tensor, drafts=True, ahead=True)
        fill_pages(self._runner.kv_cache)

    def rows(self, most: int) -> Iterator[dict[str, Any]]:
        """``most``: rows of the largest bucket."""
        yield from self._captured(most)
        for rows, context in PLAIN:
            seconds, _ = self._time(rows, context, 0, ahead=True)
            name = f"step, batch {rows}, {context} tokens of context"
            yield figure(name, 1e3 * seconds, "ms", bar={1: 3.0, 16: 7.2, 64: 12.5}.get(rows))
        for rows, context in DRAFTED:
            plain, _ = self._time(rows, context, 0, ahead=True)
            # As many as it takes for the share of drafts that agree.
            drafted, tokens = self._time(rows, context, 1, ahead=True, steps=max(60, 400 // rows))
            name = f"one draft, {AGREEMENT:.0%} of them right, batch {rows}: tokens a second over none"
            yield figure(name, tokens * plain / drafted, "x", bar={1: 1.4, 32: 1.2}[rows], least=True)
        ahead, _ = self._time(32, 4096, 1, ahead=True)
        in_turns, _ = self._time(32, 4096, 1, ahead=False)
        yield figure("steps ahead over steps in turns, one draft, batch 32", 100 * (in_turns / ahead - 1), "%")
        if self._cuda:
            for rows, context in PLAIN:
                yield from self._idle(rows, context)

    def _captured(self, most: int) -> Iterator[dict[str, Any]]:
        before, started = self._used(), time.perf_counter()
        pieces = self._pieces()
        self._steps(most, pieces).prepare()
        graphs = f"{len(pieces)} graphs, up to {most} rows, 0 and 1 drafts"
        seconds = time.perf_counter() - started
        yield figure(f"capture of {graphs}, kernels compiled meanwhile", seconds, "s", bar=None)
        yield figure(f"memory of {graphs}", (self._used() - before) / 2**20, "MiB")
        started = time.perf_counter()
        self._steps(most, self._pieces()).prepare()
        yield figure(f"capture of {graphs}", time.perf_counter() - started, "s", bar=20.0)

    def _pieces(self) -> Captured | Uncaptured:
        return Captured() if self._cuda else Uncaptured()

    def _steps(self, most: int, pieces: Captured | Uncaptured) -> DecodeSteps:
        return self._runner.use_decode_steps(pieces, rows=most, tokens=32768, depths=(0, 1), agreement=AGREEMENT)

    def _time(self, rows: int, context: int, depth: int, *, ahead: bool, steps: int = 40) -> tuple[float, float]:
        """Seconds of a step, and tokens of a row in one."""
        decoding = Decoding(self._runner, self._pages, rows, context, depth, ahead=ahead)
        decoding.steps(5)
        seconds = decoding.steps(steps if self._cuda else 2)
        tokens = decoding.tokens / rows / (steps if self._cuda else 2)
        decoding.end()
        return seconds, tokens

    def _idle(self, rows: int, context: int, steps: int = 8) -> Iterator[dict[str, Any]]:
        decoding = Decoding(self._runner, self._pages, rows, context, 0, ahead=True)
        decoding.steps(3)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            decoding.steps(steps)
        decoding.end()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in trace.events()
            if event.device_type == DeviceType.CUDA
        )
        gaps, end = [], spans[0][1]
        for start, stop in spans[1:]:
            gaps.append(max(0.0, start - end))
            end = max(end, stop)
        # The largest gap of a step is the one between it and the next: the median of these.
        between = sorted(gaps)[-steps:][steps // 2]
        layers = self._slice.model.config.num_layers
        yield figure(f"launches a layer, batch {rows}", len(spans) / steps / layers, "")
        yield figure(f"GPU idle between steps, batch {rows}", between, "us", bar=150.0)

    def _used(self) -> int:
        if not self._cuda:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free


def figure(name: str, value: float, unit: str, *, bar: float | None = None, least: bool = False) -> dict[str, Any]:
    """One row; ``least`` where more is better."""
    met = None if bar is None else (value >= bar if least else value <= bar)
    print(f"{name}: {value:.4g} {unit}" + ("" if met is None else f" (bar {bar}: {met})"), flush=True)
    fields: dict[str, Any] = {"figure": name, "value": value, "unit": unit, "floor": None, "peer": None}
    return fields | {"peer_value": None, "bar": bar, "met": met}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "engine_steps.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--pages", type=int, default=5200)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--commit", default="")
    options = parser.parse_args(arguments)
    device, config = torch.device(options.device), KNOWN_MODELS["hy3"]
    config = replace(
        config, num_layers=options.layers, num_mtp_layers=1, sparse_layers=config.sparse_layers[: options.layers]
    )
    kind = "fp8" if device.type == "cuda" else "bf16"
    rank_slice = build_slice(SliceOptions(config, ParallelPlan(tp=8), device, dtype=kind, kv=kind, mtp=True))
    here = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "commit": options.commit or here.stdout.strip(),
        "command": "python3 bench/engine_steps.py",
        "rows": [],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for row in Bench(rank_slice, options.pages).rows(options.rows):
        result["rows"].append(row)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
