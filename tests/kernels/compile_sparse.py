"""Compiles for sm_90 the kernels of sparse prefill as the wrappers launch them; prints JSON lines.

A script of its own because the kernels must be defined outside Triton's interpreter, which the tests beside it run in.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from types import SimpleNamespace

import compile_gluon
import plain_recorder
import torch

select = importlib.import_module("katydid_kernels.stem_select.op")
sparse = importlib.import_module("katydid_kernels.block_sparse_prefill.launch")
plans = importlib.import_module("katydid_kernels.stem_select.plan")
rules = importlib.import_module("katydid_kernels.stem_select.budget")

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
CONTEXT, CHUNK, HEADS = 131072, 2048, 8


def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8).view(dtype) if dtype == E4M3 else torch.zeros(*shape, dtype=dtype)


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    pages = CONTEXT // 64
    return (
        tensor(CHUNK, HEADS, 128, dtype=dtype), tensor(pages, 1, 64, 128, dtype=dtype),
        tensor(pages, 1, 128, 64, dtype=dtype), torch.zeros(1, pages, dtype=torch.int32),
    )  # fmt: skip


def main() -> None:
    for name in ("pool_kernel", "score_kernel", "select_kernel"):
        setattr(select, name, plain_recorder.Recorder(getattr(select, name)))
    sparse.combine_kernel = plain_recorder.Recorder(sparse.combine_kernel)
    sparse.sparse_hopper_kernel = compile_gluon.Recorder(sparse.sparse_hopper_kernel)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment]
    plan = plans.sparse_plan(rules.StemRule(tail=4), [CHUNK], [CONTEXT], [131072])
    keeps_all = plans.sparse_plan(rules.StemRule(), [CHUNK], [CONTEXT], [None])
    for name, dtype in (("fp8", E4M3), ("bf16", BF16)):
        scales = [torch.ones(CHUNK, HEADS), *[torch.ones(1)] * 2] if dtype == E4M3 else [None] * 3
        named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
        plain_recorder.Recorder.launched.clear()
        for each in (plan, keeps_all) if dtype == E4M3 else ():
            select.launch_select(*operands(dtype), each, BF16, scale=None, **named)
        for line in plain_recorder.Recorder.launched:
            print(json.dumps({"case": "select", **line}))
        plain_recorder.Recorder.launched.clear()
        compile_gluon.Recorder.launched.clear()
        lists = torch.zeros(plan.tiles, HEADS, plan.most, dtype=torch.int32)
        out = tensor(1, dtype=BF16)
        sparse.launch_hopper(sparse.SparseProblem(*operands(dtype), plan, lists, out, 0.1, *scales))
        for line in plain_recorder.Recorder.launched:
            print(json.dumps({"case": "combine", **line}))
        for kernel, cubin in compile_gluon.Recorder.launched:
            print(json.dumps({"case": f"attend {name}", "kernel": kernel, **dataclasses.asdict(cubin)}))


if __name__ == "__main__":
    main()
