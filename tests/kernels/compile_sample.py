"""Compiles the sampler's kernels and those of verification for sm_90 as they are launched; prints JSON lines.

A script of its own because the kernels must be defined outside Triton's interpreter, which the tests beside it run in.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from plain_recorder import Recorder, record

LAUNCH = importlib.import_module("katydid_kernels.sample.launch")
VERIFY = importlib.import_module("katydid_kernels.verify_draft")
ADVANCE = importlib.import_module("katydid_kernels.advance")
BATCH = importlib.import_module("katydid_kernels.sample.batch")
VOCAB = 120832


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def run_sample() -> None:
    fp32, seen = torch.ones(2), torch.zeros(2, VOCAB, dtype=torch.int16)
    penalties = BATCH.Penalties(int32(2), fp32, fp32, fp32, seen, int32(2, 3))
    bias = BATCH.LogitBias(int32(3), int32(4), torch.zeros(4))
    batch = BATCH.SamplingBatch(
        fp32, int32(2), fp32, fp32, torch.zeros(2, dtype=torch.int64), int32(2), penalties, bias,
        int32(2, VOCAB // 32),
    )  # fmt: skip
    LAUNCH.launch_sample(torch.zeros(2, VOCAB), batch, overlap=True)


def run_advance() -> None:
    flat = int32(8)
    step = ADVANCE.StepInputs(flat, flat, flat, int32(2), int32(2, 64), flat, int32(2), int32(8, 3))
    ADVANCE.launch(step, ADVANCE.Sampled(int32(2, 4), int32(2), int32(2), int32(2, 3)), int32(2))


def main() -> None:
    for module in (LAUNCH, VERIFY, ADVANCE):
        for name, value in vars(module).copy().items():
            if name.endswith("_kernel"):
                setattr(module, name, Recorder(value))
    seen = torch.zeros(2, VOCAB, dtype=torch.int16)
    cases: dict[str, Callable[[], object]] = {
        "all": run_sample,
        "logprobs": lambda: LAUNCH.launch_logprobs(torch.zeros(2, VOCAB), int32(2), 20),
        "verify": lambda: VERIFY.launch(int32(2, 4), int32(2, 3), int32(2), int32(2), seen),
        "advance": run_advance,
    }
    record(cases)


if __name__ == "__main__":
    main()
