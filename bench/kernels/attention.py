"""Measures the attention kernels against their bars on one Hopper GPU and writes one row for every bar.

    PYTHONPATH=kernels:bench/kernels python bench/kernels/attention.py --out bench/results/attention.json

FA3 and FlashInfer are measured in the same process where vLLM's and FlashInfer's packages are on PYTHONPATH, cuDNN
through torch.  A run ends at the first kernel that does not match the float64 reference.  Rows are written as they
come: a run cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from attention_cases import (
    BATCHES,
    BF16,
    FP8,
    MIXES,
    Decode,
    Pool,
    Prefill,
    log_normal_batches,
    time_graph,
    uniform_twin,
)
from attention_peers import PeerPool, peers
from katydid_kernels.decode_attention import decode_attention, decode_attention_reference, decode_ctas
from katydid_kernels.decode_plan import RECORD, decode_plan
from katydid_kernels.prefill_attention import prefill_attention, prefill_attention_reference
from torch import Tensor

POOL_BYTES = 1.3e9
LIMITS = {FP8: 3e-2, BF16: 4e-3}


class Report:
    """Rows of figures, on the screen and in a file at once."""

    def __init__(self, path: Path, commit: str) -> None:
        self.path, self.commit, self.rows = path, commit, list[dict[str, object]]()
        self.start = time.monotonic()

    def add(self, what: str, case: str, value: float, unit: str, bar: float | None, **more: object) -> None:
        """A figure; `bar` is an upper limit for times, errors and ratios to ourselves, else a lower one."""
        low = unit in ("us", "error", "x of q_len 1", "x of uniform")
        line: dict[str, object] = {
            "figure": f"{what}, {case}",
            "value": round(value, 4),
            "unit": unit,
            "floor": None,
            "peer": None,
            "peer_value": None,
            "bar": bar,
            "met": None if bar is None else (value <= bar if low else value >= bar),
            **more,
        }
        self.rows.append(line)
        print(f"{time.monotonic() - self.start:6.1f}s", *(f"{k}={v}" for k, v in line.items()), flush=True)
        about = {
            "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
            "commit": self.commit,
            "command": "PYTHONPATH=kernels:bench/kernels python bench/kernels/attention.py",
            "method": "median of CUDA graph replays, cold L2; bandwidth against a copy rate of 4.27 TB/s",
        }
        self.path.write_text(json.dumps({**about, "rows": self.rows}, indent=1) + "\n")


class Setup:
    """Pools by name ("fp8 8/1" is e4m3 pages, 8 query heads on 1 kv head)."""

    def __init__(self) -> None:
        shapes = {"fp8 8/1": (1, FP8), "bf16 8/1": (1, BF16), "fp8 64/8": (8, FP8), "bf16 64/8": (8, BF16)}
        self.pools = {name: Pool.make(POOL_BYTES, heads, dtype) for name, (heads, dtype) in shapes.items()}

    def decode(self, name: str, lens: list[int], q_len: int = 1) -> Decode:
        return Decode(self.pools[name], lens, int(name.split()[1].split("/")[0]), q_len)

    @functools.cache  # noqa: B019 - one setup a process
    def peer_pool(self, name: str) -> PeerPool:
        return PeerPool(self.pools[name])

    def prefill(self, name: str, new: int, prefix: int) -> Prefill:
        return Prefill(self.pools[name], new, prefix, int(name.split()[1].split("/")[0]))


def run_decode(args: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], scale: dict[str, Any]) -> Tensor:
    """The output of one call, launched as the timed ones are."""
    q, k_pages, lens = args[0], args[1], args[4]
    plan = decode_plan(lens, k_pages.shape[1], ctas=decode_ctas(q.device), q_len=q.shape[1], block_table=args[3])
    torch.cuda.synchronize()
    return decode_attention(*args, plan=plan, overlap=True, **scale)[0]


def correctness(setup: Setup, report: Report) -> None:
    def compare(case: str, got: Tensor, exact: Tensor, limit: float) -> None:
        error = ((got.double() - exact).norm() / exact.norm()).item()
        report.add("correct", case, error, "error", limit)
        if not error <= limit:
            raise SystemExit(f"{case} is wrong: no figures")

    for name, pool in setup.pools.items():
        limit = LIMITS[pool.k.dtype]
        for q_len in (1, 2, 4):
            case = setup.decode(name, [700, 0, 64, 5000], q_len)
            q, scale = case.query()
            args = (q, pool.k, pool.v, pool.tables(case.lens)[0], torch.tensor(case.lens, dtype=torch.int32).cuda())
            exact, _ = decode_attention_reference(*args, dtype=torch.float64, **scale)
            compare(f"decode {name} q_len {q_len}", run_decode(args, scale), exact, limit)
        q, scale = Prefill(pool, 300, 0, 8 * pool.kv_heads).query()
        cu = torch.tensor([0, 200, 300], dtype=torch.int32, device="cuda")
        lens = torch.tensor([300, 1000], dtype=torch.int32).cuda()
        ragged = (q, pool.k, pool.v, pool.tables([300, 1000])[0], lens, cu)
        exact, _ = prefill_attention_reference(*ragged, dtype=torch.float64, **scale)
        compare(f"prefill {name}", prefill_attention(*ragged, **scale)[0], exact, limit)
    errors = []
    for length in (4096, 262144):
        case = setup.decode("fp8 8/1", [length])
        q, scale = case.query()
        pool = case.pool
        args = (q, pool.k, pool.v, pool.tables([length])[0], torch.tensor([length], dtype=torch.int32).cuda())
        exact, _ = decode_attention_reference(*args, dtype=torch.float64, **scale)
        errors.append(((run_decode(args, scale).double() - exact).norm() / exact.norm()).item())
    report.add("fp8 error at 256K over that at 4K", "decode fp8 8/1", errors[1] / errors[0], "error", 1.5)


def decode_bars(setup: Setup, report: Report) -> None:
    lens = torch.randint(1, 100_000, (256,), device="cuda", dtype=torch.int32)
    plan = torch.empty(decode_ctas(lens.device), RECORD, dtype=torch.int32, device="cuda")
    table = torch.zeros(256, 1600, dtype=torch.int32, device="cuda")
    once = time_graph([lambda: decode_plan(lens, 1, ctas=len(plan), block_table=table, out=plan)] * 20)
    report.add("planner", "batch 256", once, "us", 4)

    single = 0.0
    for name, batch, target in (
        ("fp8 8/1", "64x4K", 20),
        ("bf16 8/1", "64x4K", 36),
        ("fp8 8/1", "64x512", 7),
        ("fp8 8/1", "1x16K+15x64", 9),
    ):
        case = setup.decode(name, BATCHES[batch])
        figure, alone = case.time(), case.time(overlap=False)
        more = {"floor": round(figure * case.bandwidth(figure), 2), "without_overlap_us": round(alone, 2)}
        report.add("decode time", f"{name} {batch}", figure, "us", target, **more)
        single = single or figure
    for q_len in (2, 4):
        figure = setup.decode("fp8 8/1", BATCHES["64x4K"], q_len).time()
        report.add(
            "several new tokens", f"fp8 8/1 64x4K q_len {q_len}", figure / single, "x of q_len 1", 1.1, us=figure
        )
    for name, batch in (("fp8 8/1", "128x8K"), ("fp8 64/8", "64x4K"), ("bf16 8/1", "128x8K"), ("bf16 64/8", "64x4K")):
        case = setup.decode(name, BATCHES[batch])
        figure = case.time()
        report.add("decode bandwidth", f"{name} {batch}", case.bandwidth(figure), "of copy", 0.92, us=round(figure, 2))


def mixes(setup: Setup, report: Report) -> None:
    against_static = []
    for batch, lens in {**MIXES, "64x4K": BATCHES["64x4K"]}.items():
        case = setup.decode("fp8 8/1", lens)
        figure, uniform = case.time(), setup.decode("fp8 8/1", uniform_twin(lens)).time()
        report.add("mix against uniform", batch, figure / uniform, "x of uniform", 1.10, us=round(figure, 2))
        static = {splits: case.time(splits=splits) for splits in (4, 16)}
        against_static.append(static[4] / figure)
        more = {f"static_{splits}_us": round(us, 2) for splits, us in static.items()}
        target = 2.95 if batch.startswith("1x") else None
        report.add("against static 4-way split", batch, static[4] / figure, "x", target, us=round(figure, 2), **more)
    report.add("against static 4-way split", "geometric mean", geometric_mean(against_static), "x", 1.76)
    ratios, shares = [], []
    for lens in log_normal_batches(20).values():
        case = setup.decode("fp8 8/1", lens)
        figure = case.time()
        ratios.append(figure / setup.decode("fp8 8/1", uniform_twin(lens)).time())
        shares.append(case.bandwidth(figure))
    report.add("mix against uniform", "20 log-normal, worst", max(ratios), "x of uniform", 1.10)
    report.add("decode bandwidth", "20 log-normal, mean", sum(shares) / len(shares), "of copy", 0.92)


def prefill_bars(setup: Setup, report: Report) -> None:
    dense: dict[str, float] = {}
    for name in ("bf16 64/8", "fp8 64/8", "bf16 8/1", "fp8 8/1"):
        for new in (8192, 32768):
            case = setup.prefill(name, new, 0)
            dense[name] = case.tflops(case.time())
            target = 800.0 if name.startswith("fp8") else None
            report.add("prefill", f"{name} {new}", dense[name], "TFLOP/s", target)
    for name, rate in dense.items():
        case = setup.prefill(name, 2048, 131072)
        chunk = case.tflops(case.time())
        report.add("2K chunk over 128K", name, chunk / rate, "of the 32K rate", 0.85, tflops=round(chunk, 1))


PREFILL_CASES = [(name, new) for name in ("bf16 64/8", "fp8 64/8", "bf16 8/1", "fp8 8/1") for new in (8192, 32768)]
DECODE_CASES = [
    *(("fp8 8/1", batch, q_len) for batch in BATCHES for q_len in ((1, 2, 4) if batch == "64x4K" else (1,))),
    *(("bf16 8/1", batch, 1) for batch in ("64x4K", "64x512", "1x128K+31x4K", "1x256K", "128x8K")),
    *(("fp8 64/8", batch, 1) for batch in ("64x4K", "1x128K+31x4K")),
    *(("bf16 64/8", batch, 1) for batch in ("64x4K", "1x128K+31x4K")),
]


def against_peers(setup: Setup, report: Report) -> None:
    others = peers()
    for name, new in PREFILL_CASES:
        prompt = setup.prefill(name, new, 0)
        runs = {peer.name: functools.partial(peer.prefill, prompt) for peer in others}
        rates = {peer: prompt.tflops(us) for peer, us in in_turn({"ours": prompt.time, **runs}).items()}
        add_peers(report, "prefill against peers", f"{name} {new}", rates, "TFLOP/s", max)
    faster = []
    for pool, batch, q_len in DECODE_CASES:
        case, pages = setup.decode(pool, BATCHES[batch], q_len), setup.peer_pool(pool)
        runs = {peer.name: functools.partial(peer.decode, pages, case) for peer in others}
        times = in_turn({"ours": case.time, **runs})
        faster += add_peers(report, "decode against peers", f"{pool} {batch} q_len {q_len}", times, "us", min)
    if faster:
        report.add("decode against peers", "geometric mean", geometric_mean(faster), "x", 1.25)


def in_turn(runs: dict[str, Callable[[], float | None]]) -> dict[str, float]:
    """The better of two measurements of each, all of them in turn: clocks rise and fall with what ran before."""
    times: dict[str, float] = {}
    for name, run in [*runs.items(), *runs.items()]:
        if us := run():
            times[name] = min(us, times.get(name, us))
    return times


def add_peers(
    report: Report, what: str, case: str, figures: dict[str, float], unit: str, best: Callable[..., str]
) -> list[float]:
    """A row that says how many times faster than the best peer we are; none, and nothing, where there is no peer."""
    ours = figures.pop("ours")
    if not figures:
        return []
    name = best(figures, key=figures.__getitem__)
    ratio = ours / figures[name] if unit == "TFLOP/s" else figures[name] / ours
    more: dict[str, Any] = {f"{peer} {unit}": round(value, 2) for peer, value in figures.items()}
    more |= {f"ours {unit}": round(ours, 2), "peer": name, "peer_value": round(figures[name], 2)}
    report.add(what, case, ratio, "x", 1.0, **more)
    return [ratio]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    sections: dict[str, Callable[[Setup, Report], None]] = {
        "correctness": correctness,
        "decode": decode_bars,
        "prefill": prefill_bars,
        "mixes": mixes,
        "peers": against_peers,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/attention.json"))
    parser.add_argument("--only", nargs="*", choices=sections, default=list(sections))
    parser.add_argument("--commit", default="", help="what is measured, where git can't say")
    options = parser.parse_args()
    setup, report = Setup(), Report(options.out, options.commit)
    for name in options.only:
        sections[name](setup, report)


if __name__ == "__main__":
    main()
