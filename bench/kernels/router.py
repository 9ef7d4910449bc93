"""Measures the router against its bars on one Hopper GPU, beside fp32 cuBLAS and torch's top-k in the same run.

    PYTHONPATH=kernels:bench/kernels python bench/kernels/router.py --out bench/results

First how many of a million tokens go to the experts that float64 would choose; a router that fails this gets no time.
Then the time of one call, weights (and many tokens) rotated past the L2, captured in one graph.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gemm_timing import BF16_TFLOPS, COPY_TB_PER_S, Row, measuring, median_us, preparing, row
from katydid_kernels import add_rms_norm, quantize_fp8
from katydid_kernels.router import RouterWeight, add_rms_norm_route, router
from results_file import write_rows
from torch import Tensor

EXPERTS, HIDDEN, TOP_K, SCALE = 192, 4096, 8, 2.826
# tokens: bar in us, best public kernel measured earlier on this GPU, which stops at the logits.
CASES = {
    1: (5.0, 6.3), 4: (5.0, 6.4), 16: (5.0, 7.4), 64: (5.0, 7.8), 256: (None, 14.1),
    1024: (18.0, 34.0), 4096: (34.0, 53.9), 16384: (110.0, 152.0),
}  # fmt: skip
PUBLIC = "best public kernel, logits alone, measured earlier"
CUBLAS = "fp32 cuBLAS, sigmoid, torch top-8"
L2_BYTES = 120e6


def route(x: Tensor, weight: RouterWeight | Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return router(x, weight, top_k=TOP_K, scoring="sigmoid", selection_bias=bias, scale=SCALE)


def unfused(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(x.float() @ weight.T)
    ids = torch.topk(scores + bias, TOP_K).indices
    weights = scores.gather(1, ids)
    return weights / (weights.sum(1, keepdim=True) + 1e-20) * SCALE, ids


def make_weight() -> tuple[Tensor, Tensor]:
    weight = 0.02 * torch.randn(EXPERTS, HIDDEN, device="cuda")
    return weight, 0.05 * torch.randn(EXPERTS, device="cuda")


def agreement(call: Callable[[Tensor], Tensor], weight: Tensor, bias: Tensor, tokens: int, batch: int) -> float:
    """Share of random tokens whose set of experts is float64's."""
    wide, equal = weight.double().T, 0
    chunk = 16384 // batch * batch
    for _ in range(-(-tokens // chunk)):
        x = torch.randn(chunk, HIDDEN, device="cuda").bfloat16()
        expected = torch.topk(torch.sigmoid(x.double() @ wide) + bias.double(), TOP_K).indices.sort(1).values
        found = torch.cat([call(part) for part in torch.split(x, batch)]).sort(1).values
        equal += int((found == expected).all(1).sum())
    return equal / (-(-tokens // chunk) * chunk)


def check(million: int) -> tuple[dict[str, float], list[Row]]:
    weight, bias = make_weight()
    two, three = RouterWeight.prepare(weight), RouterWeight.prepare(weight, terms=3)
    calls: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
        "two terms": (lambda x: route(x, two, bias)[1], million, 16384),
        "two terms, batches of 1024": (lambda x: route(x, two, bias)[1], million // 8, 1024),
        "two terms, batches of 64": (lambda x: route(x, two, bias)[1], million // 32, 64),
        "three terms": (lambda x: route(x, three, bias)[1], million, 16384),
        "fp32 cuBLAS": (lambda x: unfused(x, weight, bias)[1], million, 16384),
        "bf16 weights": (lambda x: unfused(x, weight.bfloat16().float(), bias)[1], million // 8, 16384),
    }
    shares = {name: 100 * agreement(call, weight, bias, tokens, batch) for name, (call, tokens, batch) in calls.items()}
    rows = [
        row(f"router {name}: tokens with float64's top-8 set", shares[name], "%", 100, 99.99, "fp32 cuBLAS",
            shares["fp32 cuBLAS"])
        for name in ("two terms", "three terms")
    ]  # fmt: skip
    for name, found in zip(("two terms", "three terms"), rows, strict=True):
        found["value"], found["peer_value"] = round(shares[name], 5), round(shares["fp32 cuBLAS"], 5)
    return shares, rows


def floor_us(tokens: int, terms: int) -> float:
    flops = 2 * terms * tokens * EXPERTS * HIDDEN
    size = 2 * HIDDEN * (tokens + terms * EXPERTS)
    return max(1e-6 * flops / BF16_TFLOPS, 1e-6 * size / COPY_TB_PER_S)


def time_case(tokens: int, terms: int) -> list[Row]:
    bar, public = CASES[tokens]
    with preparing():
        sets = max(2, int(L2_BYTES / (2 * HIDDEN * (tokens + terms * EXPERTS))) + 1)
        data = []
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        for _ in range(sets):
            weight, bias = make_weight()
            if tokens > 64:
                # Few tokens come out of the L2 in a layer too: the norm before has just written them.
                x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
            data.append((x, RouterWeight.prepare(weight, terms=2 if terms == 2 else 3), bias))
        route(*data[0])
        chain = [partial(unfused, x, weight.weight, bias) for x, weight, bias in data[: max(2, sets // 4)]]
        chain[0]()
    with measuring():
        us = median_us([partial(route, *item) for item in data])
        torch_us = median_us(chain, replays=7) if terms == 2 else None
    name = f"router x{terms} with top-8, {tokens} tokens"
    if terms == 3:
        return [row(name, us, "us", floor_us(tokens, terms), None, None, None)]
    return [
        row(name, us, "us", floor_us(tokens, terms), bar, PUBLIC, public),
        row(f"{name}: against torch", us, "us", floor_us(tokens, terms), None, CUBLAS, torch_us),
    ]


def time_with_norm(tokens: int) -> Row:
    """What stands before the experts: residual, norm, e4m3 rows and router, in one launch and op by op."""
    with preparing():
        x, residual = (torch.randn(tokens, HIDDEN, device="cuda").bfloat16() for _ in range(2))
        norm = torch.rand(HIDDEN, device="cuda").bfloat16()
        layers = [(RouterWeight.prepare(weight), bias) for weight, bias in (make_weight() for _ in range(40))]

        def together(weight: RouterWeight, bias: Tensor) -> object:
            return add_rms_norm_route(
                x, residual, norm, 1e-5, weight, top_k=TOP_K, scoring="sigmoid", selection_bias=bias, scale=SCALE,
                fp8=True,
            )  # fmt: skip

        def apart(weight: RouterWeight, bias: Tensor) -> object:
            y, total = add_rms_norm(x, residual, norm, 1e-5)
            return total, quantize_fp8(y), route(y, weight, bias)

        together(*layers[0])
        apart(*layers[0])
    with measuring():
        us = median_us([partial(together, *layer) for layer in layers])
        apart_us = median_us([partial(apart, *layer) for layer in layers])
    name = f"add + norm + quantise + router with top-8 in one launch, {tokens} tokens"
    return row(name, us, "us", floor_us(tokens, 2), None, "our three launches", apart_us)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--tokens", type=int, default=1 << 20)
    arguments = parser.parse_args()
    os.environ.setdefault("GEMM_BENCH_LOCK", tempfile.mkstemp()[1])
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    with preparing():
        shares, rows = check(arguments.tokens)
    print(json.dumps(shares), flush=True)
    if min(found["value"] for found in rows) >= 99.99:
        for tokens in CASES:
            rows += time_case(tokens, 2)
        for tokens in (64, 4096, 16384):
            rows += time_case(tokens, 3)
        rows += [time_with_norm(tokens) for tokens in (1, 8)]
    for found in rows:
        print(json.dumps(found), flush=True)
    write_rows(arguments.out / "router.json", rows, "router.py")


if __name__ == "__main__":
    main()
