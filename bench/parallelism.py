"""Plans without a GPU: balance of experts, bytes that ranks send, what fp8 transfers cost, and what is predicted.

    PYTHONPATH=. python bench/parallelism.py            writes bench/results/parallelism.json

Bytes are counted where they are given to the collectives; loss is that of hy3-tiny on two and four processes over gloo,
on this repository's documentation. What is predicted comes from the planner: speeds measured on one H200, links partly
assumed; every row says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from katydid_engine.eplb.balance import imbalance, place_experts
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import build_model
from katydid_engine.parallel import ParallelPlan
from katydid_engine.planning.choose import Target, predict
from katydid_engine.planning.known_models import KNOWN_MODELS
from katydid_engine.planning.measured import measured
from katydid_engine.planning.phases import Phases
from katydid_engine.planning.pool import Pool
from katydid_engine.rank_slice.absent_ranks import AbsentRanks
from katydid_engine.weights import RandomSource

from bench.fit_planner import SLICE, held_out

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "parallelism.json"
HY3 = KNOWN_MODELS["hy3"]
H200 = measured("h200")
PREDICTED = "predicted: speeds measured on one H200, NVLink between two, network assumed"
OP_BY_OP = "; as if its steps were graphs, which they are not"
DECODE = ("dp8,ep8", "dp16,ep16", "dp32,ep32", "dp32,ep32,fp8", "tp4,sp,dp8,ep32,fp8")
Rows = list[dict[str, Any]]


def row(
    figure: str, value: float, unit: str, *, bar: float | None = None, most: bool = True, **more: Any
) -> dict[str, Any]:
    met = None if bar is None else bool(value <= bar if most else value >= bar)
    none = {"floor": None, "peer": None, "peer_value": None}
    return {"figure": figure, "value": round(value, 5), "unit": unit, **none, "bar": bar, "met": met, **more}


def balance() -> Rows:
    """Tokens drawn from a Zipf 1.2 over Hy3's experts; placed by one window's counts, judged by the next one's."""
    rows = []
    for gpus in (8, 16, 32):
        before, after, seconds = [], [], []
        for seed in range(20):
            generator = np.random.default_rng(seed)
            shares = generator.permutation(1 / np.arange(1, 193) ** 1.2)
            windows = generator.multinomial(400_000, shares / shares.sum(), size=2).astype(float)
            started = time.perf_counter()
            places = place_experts(windows[0], 224, gpus)
            seconds.append(time.perf_counter() - started)
            before.append(imbalance(windows[1], np.arange(192), gpus))
            after.append(imbalance(windows[1], places, gpus))
        name = f"EPLB, Zipf 1.2, 192 experts and 32 copies on {gpus} GPUs"
        rows.append(
            row(f"{name}: busiest over mean, worst of 20", max(after), "x", bar=1.10, without_copies=min(before))
        )
        rows.append(row(f"{name}: time of a layer's placement, median", 1e3 * float(np.median(seconds)), "ms"))
    return rows


def sent_bytes() -> Rows:
    """Of one sparse layer at Hy3's width with few heads and narrow experts, bf16: two layers less one."""

    def per_layer(plan: str) -> float:
        counts = []
        for layers in (1, 2):
            assert HY3.moe is not None
            config = replace(
                HY3,
                num_layers=layers,
                num_heads=8,  # a row of the residual is as long with few
                sparse_layers=(True,) * layers,
                num_mtp_layers=0,
                vocab_size=256,
                max_positions=2048,
                moe=replace(HY3.moe, intermediate_size=16, shared_intermediate_size=16),
            )
            group = AbsentRanks(3, 8)
            model = build_model(
                config,
                RandomSource(dtype=torch.bfloat16),
                dtype=torch.bfloat16,
                plan=ParallelPlan.parse(plan),
                collectives=group,
            )
            # Of this rank's part of the vocabulary: the others' rows are zeros here, and all would choose alike.
            ids = [96 + index % 32 for index in range(400)]
            model.forward(ForwardBatch.pack([TokenRun(ids, 0, list(range(7)))]), model.new_kv_cache(7))
            counts.append(sum(carried.sent_bytes for carried in group.traffic.values()))
        return counts[1] - counts[0]

    rows = []
    for plan in ("tp8,sp", "tp8,sp,ep8"):
        plain, quantised = per_layer(plan), per_layer(f"{plan},fp8")
        rows.append(
            row(
                f"bytes sent a layer, {plan}, 400 tokens: fp8 transfers over bf16",
                quantised / plain,
                "x",
                bar=0.55,
                bytes_plain=plain,
                bytes_fp8=quantised,
            )
        )
    reduced = per_layer("tp8")
    rows.append(
        row("bytes sent a layer, 400 tokens: tp8,sp,ep8,fp8 over tp8", per_layer("tp8,sp,ep8,fp8") / reduced, "x")
    )
    return rows


def loss() -> Rows:
    """Bits a byte of hy3-tiny with fp8 transfers and without."""
    model = ROOT / "models" / "hy3-tiny"
    rows = []
    for ranks, plan in ((2, "tp2,sp,ep2"), (4, "tp4,sp,ep4"), (4, "dp4,ep4")):
        found = {}
        for spelled in (plan, f"{plan},fp8"):
            with tempfile.TemporaryDirectory() as folder:
                output = Path(folder) / "bits.json"
                command = [sys.executable, str(Path(__file__).with_name("parallelism_rank.py"))]
                arguments = [str(ranks), spelled, str(model), f"file://{folder}/meet", str(output)]
                processes = [subprocess.Popen([*command, str(rank), *arguments]) for rank in range(ranks)]
                if any(process.wait(600) for process in processes):
                    raise RuntimeError(f"a rank of {spelled} failed")
                found[spelled] = json.loads(output.read_text())
        plain, quantised = found[plan]["bits_per_byte"], found[f"{plan},fp8"]["bits_per_byte"]
        rows.append(
            row(
                f"hy3-tiny, {plan}: bits a byte that fp8 transfers cost",
                quantised - plain,
                "bit",
                plain=plain,
                fp8=quantised,
                text_bytes=found[plan]["bytes"],
            )
        )
    return rows


def predictions() -> Rows:
    rows = []
    target = Target(32768, 4.0, 0.05)
    for memory in (96, 141):
        pool = Pool(max_gpus=32, memory_bytes=memory * 10**9)
        for context in (4096, 8192, 16384, 32768):
            asked = replace(target, context=context)
            base = predict(HY3, ParallelPlan.parse("tp8"), pool, H200, asked)
            for plan in DECODE:
                found = predict(HY3, ParallelPlan.parse(plan), pool, H200, asked)
                is_bar = (memory, context, plan) == (96, 32768, "dp32,ep32")
                rows.append(
                    row(
                        f"tokens a GPU-second at 50 ms, {memory} GB, {context} tokens: {plan} over tp8",
                        found.tokens_per_gpu_s / base.tokens_per_gpu_s,
                        "x",
                        bar=1.25 if is_bar else None,
                        most=False,
                        tp8=round(base.tokens_per_gpu_s, 1),
                        tpot_ms=round(found.tpot_s * 1e3, 1),
                        requests=found.requests,
                        micro_batches=found.micro_batches,
                        source=PREDICTED + (OP_BY_OP if "tp" in plan else ""),
                    )
                )
    step = Phases(HY3, ParallelPlan.parse("dp32,ep32"), H200).decode(11, 32768)
    base = predict(HY3, ParallelPlan.parse("tp8"), Pool(max_gpus=32, memory_bytes=96 * 10**9), H200, target)
    waiting = 2 * HY3.num_layers * H200["network_s"]
    counted = waiting + (step.sending - waiting) * 11 / 12 * (1 - (31 / 32) ** 8)
    name = "tokens a GPU-second at 50 ms, 96 GB, 32768 tokens: dp32,ep32 over tp8"
    for told, sending in (
        ("were only rows sent that have somewhere to go", counted),
        ("and nothing waited for the network's latency", counted - waiting),
    ):
        rate = 11 / (step.computing + sending)
        rows.append(row(f"{name}, {told}", rate / base.tokens_per_gpu_s, "x", source=PREDICTED))
    times = {
        plan: Phases(HY3, ParallelPlan.parse(plan), H200) for plan in ("tp8", "tp8,sp", "tp8,sp,fp8", "tp8,sp,ep8,fp8")
    }
    whole = times["tp8"].prefill(32768)
    for plan, bar in (("tp8,sp", None), ("tp8,sp,fp8", 0.45), ("tp8,sp,ep8,fp8", 0.40)):
        prompt = times[plan].prefill(32768)
        rows.append(
            row(
                f"TTFT of 32768 tokens, {plan}, with transfers",
                prompt.total,
                "s",
                bar=bar,
                computing=prompt.computing,
                sending=prompt.sending,
                source=PREDICTED,
            )
        )
        lower = 100 * (1 - prompt.total / whole.total)
        bar = None if plan == "tp8,sp" else 24.5
        rows.append(
            row(
                f"TTFT of 32768 tokens, {plan}: lower than tp8 ({whole.total:.3f} s)",
                lower,
                "%",
                bar=bar,
                most=False,
                source=PREDICTED,
            )
        )
    ratio = times["tp8,sp"].prefill_rows(32768) / times["tp8"].prefill_rows(32768)
    rows.append(
        row("element-wise and router time of 32768 tokens, tp8,sp over tp8", ratio, "x", bar=1 / 6, source=PREDICTED)
    )
    return rows


def measured_slice() -> Rows:
    """What one rank of each plan took for a prompt, and the planner's predictions of steps it was not fitted to."""
    slice_rows = json.loads(SLICE.read_text())["rows"]
    compared = [found for found in slice_rows if " against tp8: " in found["figure"]]
    rows = [{**found, "source": "bench/results/slice.json"} for found in compared]
    none = {"floor": None, "peer": None, "peer_value": None}
    return rows + [none | found for found in held_out({found["figure"]: found for found in slice_rows}, H200)]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    rows = balance() + sent_bytes() + measured_slice() + predictions() + loss()
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT)
    record = {
        "command": "PYTHONPATH=. python bench/parallelism.py",
        "commit": head.stdout.strip(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "assumed": list(H200.assumed),
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    for found in rows:
        print(f"{found['figure']}: {found['value']} {found['unit']} (bar {found['bar']}, met {found['met']})")


if __name__ == "__main__":
    main()
