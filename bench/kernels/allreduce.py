"""Measures the reductions over peers: emulated ranks on one GPU, or one process a GPU beside NCCL.

    PYTHONPATH=kernels:bench/kernels python bench/kernels/allreduce.py --out bench/results
    PYTHONPATH=kernels:bench/kernels torchrun --nproc-per-node 2 bench/kernels/allreduce.py --out bench/results
    PYTHONPATH=kernels:bench/kernels torchrun --nproc-per-node 2 bench/kernels/allreduce.py --dry       on CPUs, by gloo

On one GPU eight ranks are eight streams, for correctness (`tests/kernels/test_peer_reduce.py`, run before) and for the
share of a rank's own work: a group of one rank has nothing to wait for, and is compared with add and norm alone. Over
several GPUs each call is compared with NCCL and our norm, and checked against the sum of what all ranks hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gemm_timing import BF16, COPY_TB_PER_S, Row, median_us, row
from gloo_reducer import GlooReducer
from katydid_kernels import PeerReducer, add_rms_norm, emulated_peers, symmetric_peers
from katydid_kernels.peer_reduce import (
    add_rms_norm_of_ranks_reference,
    quantized_all_gather_reference,
    quantized_reduce_scatter_reference,
)
from results_file import replace_rows
from torch import Tensor

HIDDEN, EPS = 4096, 1e-5
FEW, MANY, DRY_MANY = (1, 8, 32, 128), (512, 2048, 8192, 32768), (256,)
P2P_TB_PER_S = 0.393
# NCCL all-reduce + torch add + RMSNorm on two of these GPUs, measured earlier, us.
NCCL_TWO = {8192: 339.0, 32768: 1228.0}
# By GPUs, tokens and way.
BARS = {
    **{(2, tokens, ""): 6.0 for tokens in (1, 8, 32)},
    **{(8, tokens, ""): 8.0 for tokens in (1, 8, 32)},
    (2, 8192, ""): 210.0,
    (2, 32768, ""): 780.0,
    (2, 8192, ", e4m3 on the way"): 135.0,
    (2, 32768, ", e4m3 on the way"): 500.0,
}


def randn(*shape: int, device: torch.device | str = "cuda") -> Tensor:
    return torch.randn(*shape, device=device).to(BF16)


def alone() -> list[Row]:
    """One rank: what the kernels cost beside the waiting."""
    rows, weight = [], torch.rand(HIDDEN, device="cuda") + 0.5
    sizes = {"few_tokens": FEW[-1], "tokens": 8192, "ctas": 528}
    reducer = PeerReducer(emulated_peers(1, PeerReducer.nbytes(1, HIDDEN, **sizes), "cuda")[0], HIDDEN, **sizes)
    for tokens in (*FEW, 8192):
        pairs = [(randn(tokens, HIDDEN), randn(tokens, HIDDEN)) for _ in range(4 if tokens > 128 else 40)]
        plain = median_us([partial(add_rms_norm, x, residual, weight, EPS) for x, residual in pairs])
        if tokens <= FEW[-1]:
            calls: list[Callable[[], object]] = [
                partial(reducer.all_reduce_few, x, residual, weight, EPS) for x, residual in pairs
            ]
        else:
            calls = [partial(reducer.all_reduce_many, x, residual, weight, EPS) for x, residual in pairs]
        us = median_us(calls)
        reducer.check()
        floor = 1e-6 * tokens * HIDDEN * 8 / COPY_TB_PER_S
        rows.append(row(f"all-reduce + add + RMSNorm, one rank, {tokens} tokens", us, "us", floor, None, None, None))
        ratio = row(
            f"one rank over add and norm alone, {tokens} tokens", us / plain, "us", 1, 1.2, "add + norm, us", plain
        )
        rows.append(ratio | {"unit": "x (at most)"})
    return rows


def emulated(ranks: int = 8) -> list[Row]:
    """Rounds of eight ranks at once on one GPU: all that a real group adds to it is the link."""
    rows, sizes = [], {"few_tokens": 32, "tokens": 1024, "ctas": 16}
    weight = torch.rand(HIDDEN, device="cuda") + 0.5
    memories = emulated_peers(ranks, PeerReducer.nbytes(ranks, HIDDEN, **sizes), "cuda")
    reducers = [PeerReducer(memory, HIDDEN, patience=1 << 20, **sizes) for memory in memories]
    for tokens in (1, 8, 16):
        inputs = [randn(tokens, HIDDEN) for _ in range(ranks)]
        residual = randn(tokens, HIDDEN)
        pairs = zip(reducers, inputs, strict=True)
        found = _together([partial(reducer.all_reduce_few, x, residual, weight, EPS) for reducer, x in pairs])
        expected = add_rms_norm_of_ranks_reference(inputs, residual, weight, EPS)[1]
        reducers[0].check()
        if not all(torch.equal(total, expected) for _, _, total in found):
            return [row(f"{ranks} emulated ranks, {tokens} tokens: wrong sum", 0, "us", 0, None, None, None)]
        us = _round_us(reducers, inputs, residual, weight)
        name = f"all-reduce + add + RMSNorm, {ranks} ranks emulated on one GPU, {tokens} tokens, a round"
        rows.append(row(name, us, "us", 0, None, None, None))
    for reducer in reducers:
        reducer.check()
    return rows


def _together(calls: Sequence[Callable[[], tuple[Tensor, Tensor | None, Tensor]]]) -> list[tuple[Tensor, ...]]:
    torch.cuda.synchronize()
    results: list = []
    for call in calls:
        with torch.cuda.stream(torch.cuda.Stream()):
            results.append(call())
    torch.cuda.synchronize()
    return results


def _round_us(
    reducers: list[PeerReducer], inputs: list[Tensor], residual: Tensor, weight: Tensor, rounds: int = 200
) -> float:  # fmt: skip
    """One graph of many rounds a rank, all replayed at once; the first rank's time a round."""
    streams = [torch.cuda.Stream() for _ in reducers]
    graphs = []
    for stream, reducer, x in zip(streams, reducers, inputs, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                reducer.all_reduce_few(x, residual, weight, EPS)
        graphs.append(graph)
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(streams[0])
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        end.record(streams[0])
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / rounds)
    return sorted(times)[len(times) // 2]


def of_group(ctas: int, *, dry: bool = False) -> Iterator[Row]:
    """One process a GPU: against NCCL's all-reduce and our add and norm, in graphs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    many = DRY_MANY if dry else MANY
    sizes = {"few_tokens": FEW[-1], "tokens": MANY[-1], "ctas": ctas}
    reducer: PeerReducer | GlooReducer = GlooReducer() if dry else _over_peers(sizes)
    weight = torch.ones(HIDDEN, device=_device())
    for tokens in (*FEW, *many):
        torch.manual_seed(tokens * ranks + rank)
        x = randn(tokens, HIDDEN, device=weight.device)
        torch.manual_seed(tokens)
        residual = randn(tokens, HIDDEN, device=weight.device)
        own = residual.chunk(ranks)[rank].contiguous() if tokens >= ranks else residual
        summands = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(summands, x)
        expected = add_rms_norm_of_ranks_reference(summands, residual, weight, EPS)[0]
        name = f"all-reduce + add + RMSNorm, {ranks} GPUs, {tokens} tokens"
        ways: dict[str, tuple[Callable[[], Any], float]] = {}
        if tokens <= FEW[-1]:
            floor = tokens * HIDDEN * 2 * (ranks - 1)
            ways[""] = partial(reducer.all_reduce_few, x, residual, weight, EPS), floor
            ways[", launched early"] = partial(reducer.all_reduce_few, x, residual, weight, EPS, overlap=True), floor
            ways[", e4m3 out"] = partial(reducer.all_reduce_few, x, residual, weight, EPS, fp8=True), floor
        else:
            crossing = tokens * HIDDEN * (ranks - 1) / ranks
            call = partial(reducer.all_reduce_many, x, own, weight, EPS)
            ways[""] = call, 4 * crossing
            ways[", e4m3 on the way"] = partial(call, quantized=True, fp8=True), 2 * crossing
            ways[", e4m3 out"] = partial(call, fp8=True), 3 * crossing
        nccl = _together_us(partial(_by_nccl, x.clone(), residual, weight), tokens)
        for way, (call, nbytes) in ways.items():
            y, scale, _ = _once(call)
            reducer.check()
            found = y.float() if scale is None else y.float() * scale[:, None]
            error = ((found.double() - expected.double()).norm() / expected.double().norm()).item()
            if not error < (3e-3 if scale is None else 5e-2):
                yield row(f"{name}{way}: error {error:.1e}", 0, "us", 0, 0.0, None, None) | {"met": False}
                continue
            us = _together_us(call, tokens)
            reducer.check()
            yield row(
                f"{name}{way}", us, "us", 1e-6 * nbytes / P2P_TB_PER_S, BARS.get((ranks, tokens, way)),
                "NCCL, add, norm, us", nccl,
            )  # fmt: skip
            gain_bar = 1.68 if tokens >= 8192 and ranks == 8 and not way else None
            yield row(f"{name}{way}: times faster than NCCL and norm", nccl / us, "x", 1, gain_bar, None, None)
            if ranks == 2 and tokens in NCCL_TWO:
                figure = f"{name}{way}: times faster than NCCL, torch add and RMSNorm, measured earlier"
                yield row(figure, NCCL_TWO[tokens] / us, "x", 1, None, "us", NCCL_TWO[tokens])
        if tokens <= FEW[-1]:
            yield from _sum_alone(reducer, x, summands)
    for tokens in many:
        yield from _quantised(reducer, tokens)


def _over_peers(sizes: dict[str, int]) -> PeerReducer:
    device = torch.device("cuda", torch.cuda.current_device())
    nbytes = PeerReducer.nbytes(dist.get_world_size(), HIDDEN, **sizes)
    return PeerReducer(symmetric_peers(dist.group.WORLD, nbytes, device), HIDDEN, **sizes)


def _sum_alone(reducer: PeerReducer | GlooReducer, x: Tensor, summands: list[Tensor]) -> Iterator[Row]:
    """Without residual and norm, beside NCCL's all-reduce."""
    ranks, tokens = len(summands), len(x)
    floor = 1e-6 * tokens * HIDDEN * 2 * (ranks - 1) / P2P_TB_PER_S
    name = f"all-reduce, no residual, no norm, {ranks} GPUs, {tokens} tokens"
    expected = torch.stack(summands).double().sum(0)
    found = _once(partial(reducer.sum_few, x))
    reducer.check()
    error = ((found.double() - expected).norm() / expected.norm()).item()
    if not error < 3e-3:
        yield row(f"{name}: error {error:.1e}", 0, "us", 0, 0.0, None, None) | {"met": False}
        return
    us, nccl = (
        _together_us(call, tokens) for call in (partial(reducer.sum_few, x), partial(dist.all_reduce, x.clone()))
    )
    reducer.check()
    yield row(name, us, "us", floor, None, "NCCL all-reduce, us", nccl)


def _quantised(reducer: PeerReducer | GlooReducer, tokens: int) -> Iterator[Row]:
    """Rows in e4m3, beside NCCL's bf16."""
    ranks, rank = reducer.memory.size, reducer.memory.rank
    floor = 1e-6 * tokens * HIDDEN * (ranks - 1) / ranks / P2P_TB_PER_S
    torch.manual_seed(rank)
    x = randn(tokens, HIDDEN, device=_device())
    part = x[: tokens // ranks].contiguous()
    everywhere = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(everywhere, x)
    parts = [other[: tokens // ranks] for other in everywhere]
    gathered, scales = quantized_all_gather_reference(parts)
    cases: dict[str, tuple[Callable[[], Tensor], Tensor, Callable[[], object]]] = {
        "quantized_all_gather": (
            lambda: _plain(*reducer.quantized_all_gather(part)),
            gathered.float() * scales[:, None],
            partial(dist.all_gather_into_tensor, torch.empty_like(x), part),
        ),
        "quantized_reduce_scatter": (
            lambda: reducer.quantized_reduce_scatter(x),
            quantized_reduce_scatter_reference(everywhere, rank),
            partial(dist.reduce_scatter_tensor, torch.empty_like(part), x),
        ),
    }
    for name, (call, expected, by_nccl) in cases.items():
        found = _once(call)
        reducer.check()
        error = ((found.double() - expected.double()).norm() / expected.double().norm()).item()
        figure = f"{name}, {ranks} GPUs, {tokens} tokens"
        if not error < 4e-3:
            yield row(f"{figure}: error {error:.1e}", 0, "us", 0, 0.0, None, None) | {"met": False}
            continue
        timed = partial(reducer.quantized_all_gather, part) if name == "quantized_all_gather" else call
        us, nccl = _together_us(timed, tokens), _together_us(by_nccl, tokens)
        reducer.check()
        yield row(figure, us, "us", floor, None, "NCCL in bf16, us", nccl)


def _plain(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * scales[:, None]


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _meet() -> None:
    """Also with what this rank's device has been given."""
    if _device().type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _once(call: Callable[[], Any]) -> Any:
    _meet()
    result = call()
    if _device().type == "cuda":
        torch.cuda.synchronize()
    return result


def _together_us(call: Callable[[], object], tokens: int) -> float:
    """As the slowest rank sees it."""
    if _device().type == "cpu":
        return _called_us(call)
    repeat = 40 if tokens <= 128 else 10 if tokens <= 2048 else 4
    _meet()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            call()
    # Replays follow each other with no host between them: ranks start at times of their own, but once.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(16)]
    graph.replay()
    for mark in marks:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(1e3 * before.elapsed_time(after) / repeat for before, after in pairwise(marks))
    us = torch.tensor(times[len(times) // 2], device="cuda")
    dist.all_reduce(us, dist.ReduceOp.MAX)
    return us.item()


def _called_us(call: Callable[[], object]) -> float:
    """One call by the host's clock."""
    _meet()
    started = time.perf_counter()
    call()
    us = torch.tensor(1e6 * (time.perf_counter() - started))
    dist.all_reduce(us, dist.ReduceOp.MAX)
    return us.item()


def _by_nccl(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    dist.all_reduce(x)
    add_rms_norm(x, residual, weight, EPS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--ctas", type=int, default=528, help="programs of a call for many rows")
    parser.add_argument("--dry", action="store_true", help="few rows over gloo, on CPUs; nothing is written")
    arguments = parser.parse_args()
    os.environ.setdefault("GEMM_BENCH_LOCK", tempfile.mkstemp()[1])
    group = "RANK" in os.environ
    if arguments.dry:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    elif group:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.manual_seed(0)
    rows = []
    for found in of_group(arguments.ctas, dry=arguments.dry) if group else itertools.chain(alone(), emulated()):
        rows.append(found)
        if not group or dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    if not arguments.dry and (not group or dist.get_rank() == 0):
        script = f"allreduce.py ({dist.get_world_size()} GPUs)" if group else "allreduce.py"
        replace_rows(arguments.out / "collectives.json", rows, script)
    if group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
