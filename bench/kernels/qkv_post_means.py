"""What leaving the means of keys out of e4m3 pages costs qkv_post, on one Hopper GPU.

    PYTHONPATH=kernels:bench/kernels python bench/kernels/qkv_post_means.py --out bench/results

Keys are rotated in both, as recipes with means have it; the two are timed in turns and each takes its median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from gemm_timing import COPY_TB_PER_S, E4M3, Row, measuring, median_us, preparing, row
from katydid_kernels import qkv_post_fp8, rope_table
from qkv_post import DIM, EPS, L2_BYTES, POSITIONS, Case, Layer
from results_file import replace_rows
from torch import Tensor

TURNS = 5
BAR = 0.98


def rotated(case: Case, mean: Tensor | None, layer: Layer) -> object:
    return qkv_post_fp8(
        layer.qkv, case.table, case.positions, case.slots, layer.k_pages, layer.v_pages, q_norm_weight=case.weight,
        k_norm_weight=case.weight, qk_norm="before_rope", eps=EPS, k_scale=case.scale, v_scale=case.scale, k_mean=mean,
        hadamard=True, overlap=True,
    )  # fmt: skip


def time_case(case: Case) -> list[Row]:
    tokens = len(case.slots)
    with preparing():
        layers = [case.layer() for _ in range(min(400, max(2, int(L2_BYTES / case.bytes_moved()) + 1)))]
        mean = torch.randn(case.kv_heads, DIM, device="cuda")
        rotated(case, None, layers[0])
        rotated(case, mean, layers[0])
    times: dict[bool, list[float]] = {False: [], True: []}
    with measuring():
        for _ in range(TURNS):
            for means, found in times.items():
                found.append(median_us([partial(rotated, case, mean if means else None, one) for one in layers], 5))
    without, with_means = (statistics.median(found) for found in times.values())
    name = f"qkv_post {case.q_heads}/{case.kv_heads} heads fp8, keys rotated, {tokens} tokens"
    floor = 1e-6 * case.bytes_moved() / COPY_TB_PER_S
    return [
        row(f"{name}, means left out", with_means, "us", floor, None, "with their means", without),
        row(f"{name}, means left out: speed of that with means", without / with_means, "x", 1, BAR, None, None),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    arguments = parser.parse_args()
    os.environ.setdefault("GEMM_BENCH_LOCK", tempfile.mkstemp()[1])
    torch.manual_seed(0)
    with preparing():
        table = rope_table((11158840.0 ** -(torch.arange(0, DIM, 2) / DIM)).cuda(), POSITIONS)
    rows: list[Row] = []
    for q_heads, kv_heads in ((64, 8), (8, 1)):
        for tokens in (1, 64, 8192, 32768):
            for found in time_case(Case.make(q_heads, kv_heads, tokens, E4M3, table)):
                print(json.dumps(found), flush=True)
                rows.append(found)
    replace_rows(arguments.out / "fused.json", rows, "qkv_post_means.py")


if __name__ == "__main__":
    main()
