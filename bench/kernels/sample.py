"""Measures the sampler, verification and advance against their bars on one Hopper GPU, beside their peers.

    PYTHONPATH=kernels:bench/kernels python bench/kernels/sample.py --out bench/results

FlashInfer (softmax with temperature, then joint top-k and top-p from logits) and its fused norm are timed in the same
process where its package is on the path; torch's softmax and multinomial always. No peer applies penalties, bias, a
mask or min-p. Correctness is `tests/kernels/test_sample_kernels.py`; here the tokens are compared with the reference's
once before anything is timed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gemm_timing import BF16, COPY_TB_PER_S, Row, measuring, median_us, preparing, row
from katydid_kernels import (
    LogitBias,
    Penalties,
    Sampled,
    SamplingBatch,
    StepInputs,
    advance,
    logprobs,
    sample,
    sample_reference,
    seen_tokens,
    verify_draft,
)
from results_file import replace_rows
from torch import Tensor

VOCAB, PROMPT = 120832, 8192
L2_BYTES = 130e6
# Best public sampler measured earlier on this GPU, us: FlashInfer 0.6.14 with top-k and top-p.
PUBLIC = {1: 71.0, 64: 192.0, 512: 614.0}
# What has a figure of the peers' beside it: they know top-k and top-p alone.
COMPARED = ("top-k, top-p", "all filters", "top-k, top-p, normal logits")
BATCHES = (64, 1, 512, 16, 256)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def logits_of(rows: int, kind: str = "") -> Tensor:
    """As a model's: most tokens far below a few; a third of the rows is undecided among hundreds. All but 200 tokens
    have less than 2 % of the mass together. Normal ones, as samplers are often measured on, where the kind says so."""
    logits = torch.randn(rows, VOCAB, device="cuda")
    if kind.endswith("normal logits"):
        return logits
    likely = torch.randint(0, VOCAB, (rows, 200), device="cuda")
    steps = torch.linspace(14, 6, 200, device="cuda").expand(rows, -1).clone()
    steps[::3] = steps[::3].clamp(max=10)
    return logits.scatter(1, likely, steps)


def batch_of(rows: int, kind: str) -> SamplingBatch:
    def full(value: float) -> Tensor:
        return torch.full((rows,), value, device="cuda")

    fields = {
        "all filters": (0.9, 50, 0.95, 0.02), "temperature": (0.9, 0, 1.0, 0.0), "greedy": (0.0, 0, 1.0, 0.0),
        "top-k, top-p": (0.9, 50, 0.95, 0.0), "top-p": (0.9, 0, 0.95, 0.0), "top-k 1000": (0.9, 1000, 1.0, 0.0),
        "top-p, hot": (3.0, 0, 0.95, 0.0), "top-k, top-p, normal logits": (0.9, 50, 0.95, 0.0),
    }[kind]  # fmt: skip
    temperature, top_k, top_p, min_p = fields
    penalties = bias = allowed = None
    if kind == "all filters":
        prompts = torch.randint(0, VOCAB, (rows, PROMPT), device="cuda")
        seen = torch.stack([seen_tokens(prompt[:-512], prompt[-512:], VOCAB) for prompt in prompts])
        penalties = Penalties(
            torch.arange(rows, dtype=torch.int32, device="cuda"), full(1.1), full(0.2), full(0.1), seen
        )  # fmt: skip
        bias = LogitBias(
            torch.arange(0, 8 * rows + 1, 8, dtype=torch.int32, device="cuda"),
            torch.randint(0, VOCAB, (8 * rows,), device="cuda", dtype=torch.int32),
            torch.randn(8 * rows, device="cuda"),
        )  # fmt: skip
        words = torch.randint(-(2**31), 2**31 - 1, (rows, VOCAB // 32), device="cuda", dtype=torch.int32)
        allowed = words | torch.randint(-(2**31), 2**31 - 1, words.shape, device="cuda", dtype=torch.int32)
    return SamplingBatch(
        full(temperature), torch.full((rows,), top_k, dtype=torch.int32, device="cuda"), full(top_p), full(min_p),
        torch.arange(rows, device="cuda") * 977, torch.full((rows,), 9000, dtype=torch.int32, device="cuda"), penalties,
        bias, allowed,
    )  # fmt: skip


def bytes_read(rows: int, kind: str) -> int:
    """Each logit once; its seen count and its bit of the mask, too."""
    return rows * VOCAB * 4 + (rows * VOCAB * 2 + rows * VOCAB // 8 if kind == "all filters" else 0)


def sets_of(rows: int) -> int:
    return min(64, max(2, math.ceil(L2_BYTES / (rows * VOCAB * 4)) + 1))


def time_kind(rows: int, kind: str, own: dict[tuple[int, str], float]) -> list[Row]:
    """Of our kernels, and kept in ``own`` for the peers' rows."""
    # Compiled before it is this one's turn.
    sample(logits_of(2), batch_of(2, kind), overlap=True)
    with preparing():
        batch, inputs = batch_of(rows, kind), [logits_of(rows, kind) for _ in range(sets_of(rows))]
        differing = int((sample(inputs[0], batch) != sample_reference(inputs[0], batch)).sum())
    name = f"sample, {kind}, batch {rows}"
    if differing > rows // 256:
        return [row(f"{name}: {differing} tokens differ from the reference's", 0, "us", 0, None, None, None)]
    with measuring():
        us = own[rows, kind] = median_us([partial(sample, logits, batch, overlap=True) for logits in inputs])
    floor = 1e-6 * bytes_read(rows, kind) / COPY_TB_PER_S
    found = [row(name, us, "us", floor, 25 if (rows, kind) == (64, "all filters") else None, None, None)]
    if rows in PUBLIC and kind in COMPARED:
        figure = f"{name}: times faster than the best public sampler, measured earlier"
        found.append(row(figure, PUBLIC[rows] / us, "x", 1, 5, "FlashInfer 0.6.14, us", PUBLIC[rows]))
    return found


def time_peers(rows: int, kind: str, own: dict[tuple[int, str], float]) -> list[Row]:
    if (rows, kind) not in own:
        return []
    found = []
    for peer, run in peers(rows).items():
        with preparing():
            inputs = [logits_of(rows, kind) for _ in range(sets_of(rows))]
            run(inputs[0])
        with measuring():
            theirs = median_us([partial(run, logits) for logits in inputs])
        figure = f"sample, {kind}, batch {rows}: times faster than {peer}"
        bar = 5 if peer == "FlashInfer" else None
        found.append(row(figure, theirs / own[rows, kind], "x", 1, bar, f"{peer}, us", theirs))
    return found


def peers(rows: int) -> dict[str, Callable[[Tensor], object]]:
    def with_torch(logits: Tensor) -> Tensor:
        return torch.multinomial(torch.softmax(logits / 0.9, dim=-1), 1)

    found: dict[str, Callable[[Tensor], object]] = {"torch softmax and multinomial": with_torch}
    if importlib.util.find_spec("flashinfer") is not None:
        api: Any = importlib.import_module("flashinfer.sampling")
        top_k = torch.full((rows,), 50, dtype=torch.int32, device="cuda")
        top_p = torch.full((rows,), 0.95, device="cuda")

        def with_flashinfer(logits: Tensor) -> object:
            probabilities = api.softmax(logits, temperature=0.9)
            return api.top_k_top_p_sampling_from_probs(
                probabilities, top_k, top_p, filter_apply_order="joint", deterministic=True, seed=17, offset=0
            )

        found["FlashInfer"] = with_flashinfer
    return found


def time_logprobs(rows: int) -> list[Row]:
    with preparing():
        inputs = [logits_of(rows) for _ in range(sets_of(rows))]
        ids = torch.randint(0, VOCAB, (rows,), device="cuda", dtype=torch.int32)
        logprobs(inputs[0], ids, 20)
    with measuring():
        us = median_us([partial(logprobs, logits, ids, 20) for logits in inputs])
    return [row(f"logprobs with top 20, batch {rows}", us, "us", rows * VOCAB * 4e-6 / COPY_TB_PER_S, None, None, None)]


def time_step(rows: int, width: int = 4) -> list[Row]:
    """Verification and advance, one after the other as between two steps."""
    with preparing():
        seen = torch.zeros(rows, VOCAB, dtype=torch.int16, device="cuda")
        slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        tokens = torch.randint(0, 3, (rows, width), dtype=torch.int32, device="cuda")
        drafts = torch.randint(0, 3, (rows, width - 1), dtype=torch.int32, device="cuda")
        flat = [torch.zeros(rows * width, dtype=torch.int32, device="cuda") for _ in range(4)]
        table = torch.zeros(rows, 2048, dtype=torch.int32, device="cuda")
        limits = torch.full((rows,), 131072, dtype=torch.int32, device="cuda")
        pending = torch.zeros(rows * width, width - 1, dtype=torch.int32, device="cuda")
        step = StepInputs(flat[0], flat[1], flat[2], limits.clone(), table, flat[3], limits, pending)

        left = Sampled(tokens.clone(), slots.clone(), slots.clone(), drafts)
    first = limits - 1000

    def verify() -> None:
        verify_draft(tokens, drafts, slots=slots, seen=seen, first_positions=first, left=left, overlap=True)

    def between() -> None:
        verify()
        advance(step, left, slots, overlap=True)

    between()
    with measuring():
        both, alone = median_us([between] * 20), median_us([verify] * 20)
    return [
        row(f"verify_draft, batch {rows}, {width} positions", alone, "us", 0, None, None, None),
        row(f"verify_draft and advance, batch {rows}, {width} positions", both, "us", 0, None, None, None),
    ]


def time_flashinfer_norm(tokens: int, hidden: int = 4096) -> list[Row]:
    """The peer of what follows an all-reduce, for `allreduce.py`'s figures to stand beside."""
    if importlib.util.find_spec("flashinfer") is None:
        return []
    api: Any = importlib.import_module("flashinfer")
    with preparing():
        inputs = [torch.randn(2, tokens, hidden, device="cuda").to(BF16) for _ in range(8)]
        weight = torch.ones(hidden, device="cuda", dtype=BF16)
        api.fused_add_rmsnorm(inputs[0][0], inputs[0][1], weight, 1e-5)
    with measuring():
        us = median_us([partial(api.fused_add_rmsnorm, x[0], x[1], weight, 1e-5) for x in inputs])
    return [row(f"FlashInfer add + RMSNorm, {tokens} tokens", us, "us", 0, None, None, None)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    arguments = parser.parse_args()
    os.environ.setdefault("GEMM_BENCH_LOCK", tempfile.mkstemp()[1])
    torch.manual_seed(0)
    own: dict[tuple[int, str], float] = {}
    cases = [(rows, kind) for kind in COMPARED for rows in BATCHES]
    others = ("temperature", "greedy", "top-p", "top-p, hot", "top-k 1000")
    runs: list[Callable[[], list[Row]]] = [partial(time_kind, *case, own) for case in cases]
    runs += [partial(time_kind, 64, kind, own) for kind in others]
    runs += [partial(time_logprobs, 64), partial(time_step, 64), partial(time_step, 256)]
    runs += [partial(time_peers, *case, own) for case in cases]
    runs.append(partial(time_flashinfer_norm, 32))
    rows: list[Row] = []
    for run in runs:
        for found in run():
            print(json.dumps(found), flush=True)
            rows.append(found)
        replace_rows(arguments.out / "fused.json", rows, "sample.py")


if __name__ == "__main__":
    main()
