"""Compiles for sm_90 the Gluon router kernels as the wrappers launch them; prints JSON lines.

A script of its own because the kernels must be defined outside Triton's interpreter, which the tests beside it run in.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from typing import Literal

import torch
from compile_gluon import Recorder
from katydid_kernels.gemm.plan import PlacedPairs, RoutePlan
from katydid_kernels.router.weight import OnHopper, split_into_bf16

# The package names its ops' functions, which hide the folders of the same names from a plain import statement.
launch = importlib.import_module("katydid_kernels.router.launch")


def run(
    tokens: int,
    experts: int,
    terms: int,
    scoring: Literal["sigmoid", "softmax"],
    *,
    shared: bool = False,
    placed: PlacedPairs | None = None,
) -> None:
    x, weight = torch.zeros(tokens, 4104, dtype=torch.bfloat16)[:, :4096], torch.zeros(experts, 4096)
    weights, ids = torch.zeros(tokens, 8 + shared), torch.zeros(tokens, 8 + shared, dtype=torch.int32)
    bias = torch.zeros(experts) if scoring == "sigmoid" else None
    choice = launch.Choice(8, scoring, bias, True, 2.826, weights, ids, shared)
    if tokens <= 64:
        launch.launch_few(x, on_hopper(weight, terms), experts, choice, placed=placed)
    else:
        launch.launch_many(x, on_hopper(weight, terms), experts, choice)


def on_hopper(weight: torch.Tensor, terms: int) -> OnHopper:
    return OnHopper(
        split_into_bf16(weight, terms), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    )


def run_normed(tokens: int, quantise: bool) -> None:
    x, weight = torch.zeros(tokens, 4096, dtype=torch.bfloat16), torch.zeros(192, 4096)
    weights, ids = torch.zeros(tokens, 9), torch.zeros(tokens, 9, dtype=torch.int32)
    q = torch.zeros(tokens, 4096, dtype=torch.uint8).view(torch.float8_e4m3fn) if quantise else None
    choice = launch.Choice(8, "sigmoid", torch.zeros(192), True, 2.826, weights, ids, True)
    launch.launch_normed(
        x, x, x[0], 1e-5, x, x, q, None, weights[:, 0] if quantise else None, on_hopper(weight, 2), 192, choice
    )  # fmt: skip


def main() -> None:
    launch.few_tokens_kernel = Recorder(launch.few_tokens_kernel)
    launch.many_tokens_kernel = Recorder(launch.many_tokens_kernel)
    launch.normed_router_kernel = Recorder(launch.normed_router_kernel)
    launch.sm_count = lambda device: 132
    cases: dict[str, Callable[[], None]] = {
        "1 token": lambda: run(1, 192, 2, "sigmoid", shared=True),
        "64 tokens, placed": lambda: run(
            64, 192, 2, "sigmoid", shared=True, placed=PlacedPairs(RoutePlan.allocate(64, 9, 193, "cpu"), 193, 8)
        ),
        "64 tokens, three terms": lambda: run(64, 192, 3, "sigmoid"),
        "1024 tokens, softmax": lambda: run(1024, 257, 2, "softmax", shared=True),
        "16384 tokens, three terms": lambda: run(16384, 192, 3, "sigmoid"),
        "norm of 8 tokens, quantised": lambda: run_normed(8, True),
    }
    for case, call in cases.items():
        Recorder.launched.clear()
        call()
        for kernel, cubin in Recorder.launched:
            print(json.dumps({"case": case, "kernel": kernel, "spills": cubin.spills, **dataclasses.asdict(cubin)}))


if __name__ == "__main__":
    main()
