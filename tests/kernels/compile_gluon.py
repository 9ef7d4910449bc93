"""Compiles for sm_90 every Gluon kernel the wrappers launch, with the arguments they launch it with; prints JSON lines.

A script of its own because the kernels must be defined outside Triton's interpreter, which the tests beside it run in.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, ClassVar

import katydid_kernels.gemm.experts as experts
import katydid_kernels.gemm.launch as launch
import torch
from katydid_kernels.gemm.expert_scales import ExpertScales
from katydid_kernels.gemm.tuning import NarrowTile, wide_tile
from sm90 import Cubin, compile_gluon

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


class Recorder:
    """Stands for a kernel: a launch compiles it and remembers the result."""

    launched: ClassVar[list[tuple[str, Cubin]]] = []

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in ("num_warps", "maxnreg", "launch_pdl") if name in kwargs}
            arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
            tensors = {n: v.dtype if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
            Recorder.launched.append((self.kernel.__name__, compile_gluon(self.kernel, options, **tensors)))

        return launch


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8).view(dtype) if dtype == E4M3 else torch.zeros(*shape, dtype=dtype)


def run_gemm(dtype: torch.dtype, promote: bool, **hooks: torch.Tensor) -> None:
    m, n, k = 512, 1024, 256
    a, b, out = zeros(m, k, dtype=dtype), zeros(n, k, dtype=dtype), zeros(m, n, dtype=BF16)
    blocks = "row_scale" in hooks and hooks["row_scale"].ndim == 2
    launch.launch_wide(a, b, out, wide_tile(m, n, promote=promote, blocks=blocks), promote=promote, **hooks)


def run_narrow(dtype: torch.dtype, tile: NarrowTile) -> None:
    a, b, out = zeros(5, 256, dtype=dtype), zeros(1024, 256, dtype=dtype), zeros(5, 1024, dtype=BF16)
    launch.launch_narrow(a, b, out, tile, row_scale=torch.ones(5), residual=out, promote=dtype == E4M3)


def run_experts(dtype: torch.dtype, tokens: int, width: int = 192, **scales: torch.Tensor) -> None:
    count, hidden, top_k = 8, 4096, 8
    w13, w2 = zeros(count, 2 * width, hidden, dtype=dtype), zeros(count, hidden, width, dtype=dtype)
    x, out = zeros(tokens, hidden, dtype=dtype), zeros(tokens, hidden, dtype=BF16)
    ids = torch.zeros(tokens, top_k, dtype=torch.int32)
    workspace = experts.ExpertWorkspace.allocate(tokens, top_k, w2.shape, dtype, w2.device)
    ones = ExpertScales(torch.ones(count, 2), torch.ones(count), torch.ones(1), **scales)
    experts.run_experts(x, w13, w2, torch.ones(tokens, top_k), ids, out, ones, workspace, shared=out)


def run_block_experts(tokens: int) -> None:
    count, width, hidden, top_k = 8, 256, 4096, 8
    w13, w2 = zeros(count, 2 * width, hidden, dtype=E4M3), zeros(count, hidden, width, dtype=E4M3)
    x, out = zeros(tokens, hidden, dtype=E4M3), zeros(tokens, hidden, dtype=BF16)
    ids = torch.zeros(tokens, top_k, dtype=torch.int32)
    workspace = experts.ExpertWorkspace.allocate(tokens, top_k, w2.shape, E4M3, w2.device, of_blocks=True)
    scales = ExpertScales(
        torch.ones(count, 4, 32), torch.ones(count, 32, 2), torch.ones(1), torch.ones(tokens, hidden // 128)
    )
    experts.run_experts(x, w13, w2, torch.ones(tokens, top_k), ids, out, scales, workspace)


def main() -> None:
    for module in (launch, experts):
        module.sm_count = lambda device: 132  # type: ignore[attr-defined]
        for name, value in vars(module).copy().items():
            if name.endswith("_kernel"):
                setattr(module, name, Recorder(value))
    experts.plan_routes = lambda ids, plan, count, tile, first_expert: plan  # type: ignore[assignment]
    experts.combine = lambda *args, **kwargs: None  # type: ignore[assignment]

    vector, matrix, one = torch.ones(512), zeros(512, 1024, dtype=BF16), torch.ones(1)
    cases: dict[str, Callable[[], None]] = {
        "gemm bf16": lambda: run_gemm(BF16, False),
        "gemm bf16 residual": lambda: run_gemm(BF16, False, residual=matrix, bias=matrix[0]),
        "gemm fp8": lambda: run_gemm(E4M3, False, row_scale=one, col_scale=one),
        "gemm fp8 promoted, vectors": lambda: run_gemm(E4M3, True, row_scale=vector, col_scale=vector.repeat(2)),
        "gemm fp8 few rows": lambda: run_narrow(E4M3, NarrowTile(16, 2, 10)),
        "gemm bf16 few rows, one warpgroup": lambda: run_narrow(BF16, NarrowTile(64, 1, 8)),
        "experts fp8, one token": lambda: run_experts(E4M3, 1),
        "experts bf16, one token": lambda: run_experts(BF16, 1),
        "experts fp8 decode": lambda: run_experts(E4M3, 16),
        "experts fp8 decode, scale a token": lambda: run_experts(E4M3, 17, token=torch.ones(17)),
        "experts fp8 prefill": lambda: run_experts(E4M3, 1024),
        "experts fp8 prefill, scale a token": lambda: run_experts(E4M3, 1024, token=torch.ones(1024)),
        "experts fp8 prefill, 256 columns": lambda: run_experts(E4M3, 1024, 256),
        "experts fp8 decode, scales of blocks": lambda: run_block_experts(16),
        "experts fp8 prefill, scales of blocks": lambda: run_block_experts(1024),
        "gemm fp8 scales of blocks": lambda: run_gemm(
            E4M3, True, row_scale=torch.ones(512, 2), col_scale=torch.ones(8, 2)
        ),
        "experts bf16 decode": lambda: run_experts(BF16, 16),
        "experts bf16 prefill": lambda: run_experts(BF16, 1024),
    }
    for case, run in cases.items():
        Recorder.launched.clear()
        run()
        for kernel, cubin in Recorder.launched:
            print(json.dumps({"case": case, "kernel": kernel, "spills": cubin.spills, **dataclasses.asdict(cubin)}))


if __name__ == "__main__":
    main()
