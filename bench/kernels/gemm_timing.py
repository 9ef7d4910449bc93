"""How the GEMM benchmarks take turns at the GPU, time a call and write down a row."""

from __future__ import annotations

import fcntl
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.jit import JITFunction

__all__ = [
    "BF16",
    "BF16_TFLOPS",
    "COPY_TB_PER_S",
    "E4M3",
    "FP8_TFLOPS",
    "Row",
    "compiling",
    "measuring",
    "median_us",
    "preparing",
    "row",
]

COPY_TB_PER_S, BF16_TFLOPS, FP8_TFLOPS = 4.27, 750.0, 1300.0
GRAPH_US = 2000
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
Row = dict[str, Any]


@contextmanager
def _turn(kind: int, seconds: int) -> Iterator[None]:
    path = os.environ["GEMM_BENCH_LOCK"]
    with open(path, "w") as lock:
        # Whoever waits for the GPU holds the gate, so that those who want to be alone are not passed by for ever.
        with open(path + ".gate", "w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(lock, kind)
        # A kernel that hangs cannot be interrupted, only its process ended: the alarm does, and frees the lock.
        signal.alarm(seconds)
        yield
        torch.cuda.synchronize()
        signal.alarm(0)


def preparing() -> Any:
    """While parts check their kernels, all at once."""
    return _turn(fcntl.LOCK_SH, 150)


@contextmanager
def compiling() -> Iterator[None]:
    """Within it a launch only compiles its kernel; operands are drawn as ever, so it is a part of preparing."""
    run = JITFunction.run
    JITFunction.run = lambda self, *args, **kwargs: run(self, *args, **{**kwargs, "warmup": True})
    try:
        with preparing():
            yield
    finally:
        JITFunction.run = run


def measuring() -> Any:
    """While one part times its kernels, alone."""
    return _turn(fcntl.LOCK_EX, 30)


def median_us(calls: Sequence[Callable[[], object]], replays: int = 20) -> float:
    """Median time of one call: the calls, which differ in their data, are captured in one graph and replayed. Short
    ones are captured several times over, so that starting the graph, some 5 us, is no part of them."""
    for call in calls:
        call()
    graph = _captured(calls)
    once = _replay_us(graph)
    copies = math.ceil(GRAPH_US / once)
    if copies > 1:
        graph = _captured([*calls] * copies)
    times = sorted(_replay_us(graph) for _ in range(replays))
    return times[replays // 2] / (len(calls) * copies)


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def row(
    figure: str, value: float, unit: str, floor: float, bar: float | None, peer: str | None, peer_value: float | None
) -> Row:
    """One row of a results file; less is better for microseconds, more for everything else."""
    met = None if bar is None else (value <= bar if unit == "us" else value >= bar)
    return {
        "figure": figure,
        "value": round(value, 2),
        "unit": unit,
        "floor": round(floor, 2),
        "peer": peer,
        "peer_value": None if peer_value is None else round(peer_value, 2),
        "bar": bar,
        "met": met,
    }
