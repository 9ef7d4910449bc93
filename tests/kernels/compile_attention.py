"""Compiles for sm_90 the Gluon attention kernels as the wrappers launch them; prints JSON lines.

A script of its own because the kernels must be defined outside Triton's interpreter, which the tests beside it run in.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from types import SimpleNamespace

import torch
from compile_gluon import Recorder

# The package names its ops' functions, which hide the folders of the same names from a plain import statement.
decode = importlib.import_module("katydid_kernels.decode_attention.launch")
prefill = importlib.import_module("katydid_kernels.prefill_attention.launch")

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8).view(dtype) if dtype == E4M3 else torch.zeros(*shape, dtype=dtype)


def run_decode(dtype: torch.dtype, q_len: int, heads: int, head_dim: int, quantised: bool = False) -> None:
    int32 = torch.zeros(1, 8, dtype=torch.int32)
    k, v = tensor(1, 1, 64, head_dim, dtype=dtype), tensor(1, 1, head_dim, 64, dtype=dtype)
    scales = [torch.ones(1)] * 3 if dtype == E4M3 else [None] * 3
    problem = decode.DecodeProblem(
        tensor(1, q_len, heads, head_dim, dtype=dtype), k, v, int32, int32[0],
        tensor(1, dtype=E4M3 if quantised else BF16), torch.ones(1), 0.1, None, None, *scales,
        torch.ones(1) if quantised else None,
    )  # fmt: skip
    scratch = decode.DecodeScratch.allocate(1, q_len, heads, head_dim, k.device)
    decode.launch_hopper(problem, int32, scratch, overlap=True)


def run_prefill(dtype: torch.dtype, head_dim: int) -> None:
    int32 = torch.zeros(2, 8, dtype=torch.int32)
    k, v = tensor(1, 1, 64, head_dim, dtype=dtype), tensor(1, 1, head_dim, 64, dtype=dtype)
    scales = [torch.ones(1)] * 3 if dtype == E4M3 else [None] * 3
    q = tensor(64, 8, head_dim, dtype=dtype)
    problem = prefill.PrefillProblem(
        q, k, v, int32, tensor(1, dtype=BF16), torch.ones(1), 0.1, None, None, *scales
    )  # fmt: skip
    prefill.launch_hopper(problem, int32)


def main() -> None:
    decode.decode_hopper_kernel = Recorder(decode.decode_hopper_kernel)
    decode.decode_wide_kernel = Recorder(decode.decode_wide_kernel)
    prefill.prefill_hopper_kernel = Recorder(prefill.prefill_hopper_kernel)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    cases = {
        f"decode {name} q_len {q_len}": (run_decode, (dtype, q_len, 8, 128))
        for name, dtype in (("fp8", E4M3), ("bf16", BF16))
        for q_len in (1, 2, 4)
    }
    cases |= {f"decode fp8 q_len {q_len}, quantised": (run_decode, (E4M3, q_len, 8, 128, True)) for q_len in (1, 2, 4)}
    cases |= {f"prefill {name}": (run_prefill, (dtype, 128)) for name, dtype in (("fp8", E4M3), ("bf16", BF16))}
    for case, (run, arguments) in cases.items():
        Recorder.launched.clear()
        run(*arguments)
        for kernel, cubin in Recorder.launched:
            print(json.dumps({"case": case, "kernel": kernel, "spills": cubin.spills, **dataclasses.asdict(cubin)}))


if __name__ == "__main__":
    main()
