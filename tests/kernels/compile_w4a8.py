"""Compiles for sm_90 every W4A8 kernel with the arguments it is launched with; prints JSON lines.

A script of its own because the kernels must be defined outside Triton's interpreter, which the tests beside it run in.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import katydid_kernels.w4a8.experts as experts
import katydid_kernels.w4a8.launch as launch
import torch
from compile_gluon import BF16, E4M3, Recorder, zeros
from katydid_kernels.w4a8.packing import Int4Weight, pack_int4
from katydid_kernels.w4a8.tuning import expert_tile, few_tile, grouped_tile, narrow_tile


def weight(*shape: int, gated: bool = False) -> Int4Weight:
    groups = (*shape[:-1], -(-shape[-1] // 128))
    return pack_int4(torch.zeros(shape, dtype=torch.int8), torch.ones(groups), gated=gated)


def run_linear(tokens: int) -> None:
    x, out, tile = zeros(tokens, 512, dtype=E4M3), zeros(tokens, 1024, dtype=BF16), narrow_tile(tokens)
    w, scale = weight(1024, 512), torch.ones(tokens)
    if tile is None:
        launch.launch_grouped(x, w, out, grouped_tile(), x_scale=scale, bias=out[0], residual=out)
    else:
        launch.launch_narrow(x, w, scale, out, tile, bias=out[0], residual=out)


def run_few(tokens: int, columns: int, *, quantise: bool) -> None:
    x, w = zeros(tokens, columns, dtype=BF16 if quantise else E4M3), weight(64, columns)
    tile, scale = few_tile(x, w), None if quantise else torch.ones(tokens)
    assert tile is not None
    launch.launch_few(x, w, scale, zeros(tokens, 64, dtype=BF16), tile)


def run_experts(tokens: int, pairs_of: int) -> None:
    """With the tile for `pairs_of` pairs over 192 experts."""
    count, width, hidden, top_k = 8, 192, 512, 8
    x, out = zeros(tokens, hidden, dtype=E4M3), zeros(tokens, hidden, dtype=BF16)
    workspace = experts.Int4ExpertWorkspace.allocate(tokens, top_k, count, hidden, width, x.device)
    experts.run_experts_w4a8(
        x, weight(count, 2 * width, hidden, gated=True), weight(count, hidden, width), torch.ones(tokens, top_k),
        torch.zeros(tokens, top_k, dtype=torch.int32), torch.ones(tokens), torch.ones(1), out, workspace,
        shared=out, tile=expert_tile(pairs_of, 192),
    )  # fmt: skip


def main() -> None:
    for module in (launch, experts):
        module.sm_count = lambda device: 132  # type: ignore[attr-defined]
        for name, value in vars(module).copy().items():
            if name.endswith("_kernel"):
                setattr(module, name, Recorder(value))
    experts.plan_routes = lambda ids, plan, count, tile, first_expert: plan  # type: ignore[assignment]
    experts.combine = lambda *args, **kwargs: None  # type: ignore[assignment]
    cases: dict[str, Callable[[], None]] = {
        "linear, a row in bf16": lambda: run_few(1, 1024, quantise=True),
        "linear, two rows of most columns": lambda: run_few(2, 8192, quantise=False),
        "linear, two rows in bf16": lambda: run_few(2, 4096, quantise=True),
        "linear, 8 rows": lambda: run_linear(8),
        "linear, 64 rows": lambda: run_linear(64),
        "linear, many rows": lambda: run_linear(512),
        "experts, one token": lambda: run_experts(1, 8),
        "experts, 8 rows each": lambda: run_experts(16, 1500),
        "experts, 64 rows each": lambda: run_experts(16, 12000),
        "experts, many rows": lambda: run_experts(64, 192 * 200),
    }
    for case, run in cases.items():
        Recorder.launched.clear()
        run()
        for kernel, cubin in Recorder.launched:
            print(json.dumps({"case": case, "kernel": kernel, "spills": cubin.spills, **dataclasses.asdict(cubin)}))


if __name__ == "__main__":
    main()
