"""The same engine code on a GPU and on the CPU: logits side by side, and the step loop generating.

    PYTHONPATH=kernels:services/engine:services/runtime:. python3 bench/engine_gpu.py [--cases tiny.fp8,full.bf16]

Models: hy3-tiny as shipped; SmolLM2-135M's shape and Hy3 at full width cut to its first two layers (one dense, one MoE
of 192 experts) with random weights, whose router has many near ties, so that rounding anywhere changes experts.
Schemes: fp32, bf16, and weights quantised while loading (fp8, W4A8) over plain or fp8 pages.

The oracle is the reference path on the CPU with the same quantised weights and fp32 activations, on weights rounded to
bf16. Bars, as errors of the logits relative to their norm: an fp32 GPU run within 1e-4; another within 1.25 times the
error of the reference path in bf16 on the CPU; and the same likeliest token wherever the oracle's first two are further
apart than twice the row's largest error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import tempfile
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from katydid_engine.block_pool import BlockPool
from katydid_engine.collectives import SingleRank
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import build_model, load_model
from katydid_engine.model_config import read_model_config
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.quantization import Scheme as QuantizationScheme
from katydid_engine.quantization import StoredQuantization
from katydid_engine.request import Request, Sampling
from katydid_engine.runner import Runner
from katydid_engine.scheduler import Scheduler, SchedulerConfig
from katydid_engine.weights import RandomSource
from katydid_runtime.block_hash import ChainKey
from torch import Tensor

from bench.kernels.gemm_timing import preparing

ROOT = Path(__file__).resolve().parent.parent
PROMPT_TOKENS, CHUNK, DECODES = 1000, 512, 4
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
HY3 = {
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "vocab_size": 120832,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "router_scaling_factor": 2.826,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Scheme:
    """How a model is run; on the CPU the oracle runs it with another dtype."""

    dtype: torch.dtype = torch.bfloat16
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"

    def build(self, model: BuildModel, device: str, dtype: torch.dtype | None = None) -> DecoderLM:
        return model(
            device=device,
            dtype=dtype or self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
        )


BuildModel = Callable[..., DecoderLM]
SCHEMES = {
    "fp32": Scheme(torch.float32),
    "bf16": Scheme(),
    "fp8": Scheme(quantization="fp8"),
    "fp8-blocks": Scheme(),
    "fp8-kv8": Scheme(quantization="fp8", kv_cache_dtype="fp8"),
    "w4a8": Scheme(quantization="w4a8"),
}
# Rows whose logits are compared: a router that flips in one of few rows would decide the figure.
LOGIT_ROWS = {"tiny": 1000, "smollm2": 256, "full": 64}
CASES = {
    "tiny": ("hy3-tiny", ("fp32", "bf16", "fp8", "fp8-kv8", "w4a8")),
    "smollm2": ("SmolLM2-135M's shape, random weights", ("fp32", "bf16", "fp8", "w4a8")),
    "full": ("Hy3, 2 layers at full width", ("fp32", "bf16", "fp8", "fp8-blocks")),
}


def _turn(device: str) -> contextlib.AbstractContextManager[Any]:
    """A turn at the GPU, which other benchmarks may time."""
    return preparing() if device == "cuda" else contextlib.nullcontext()


class _KeptSource(RandomSource):
    """Random weights made on the device, once, and kept on the host: three models are built of the same."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._on = device
        self._kept: dict[str, Tensor] = {}

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...], *dtypes: tuple[str, ...]) -> Tensor:
        key = f"{name} {part}"
        if key not in self._kept:
            with _turn(self._on):
                self._kept[key] = super().read(name, shape, part, *dtypes).cpu()
        return self._kept[key]


class _BlockSource(_KeptSource):
    """The same with projections in e4m3 and a scale every 128 x 128, as Qwen3's fp8 checkpoints store theirs."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._scales: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        return name in self._scales

    def stored(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        if name.endswith("_proj.weight"):
            return "F8_E4M3", ()
        return ("F32", tuple(self._scales[name].shape)) if name in self._scales else None

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...], *dtypes: tuple[str, ...]) -> Tensor:
        """A projection comes before its scales and is read whole: the plan has one rank."""
        if name in self._scales:
            return self._scales[name]
        weight = super().read(name, shape, part, *dtypes)
        if not name.endswith("_proj.weight"):
            return weight
        if f"{name} e4m3" not in self._kept:
            with _turn(self._on):
                rows, columns = weight.shape
                blocks = weight.to(self._on).float().view(rows // 128, 128, columns // 128, 128)
                scale = blocks.abs().amax((1, 3)) / 448
                self._scales[f"{name}_scale_inv"] = scale.cpu()
                codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(shape)
                self._kept[f"{name} e4m3"] = codes.cpu()
        return self._kept[f"{name} e4m3"]


def model_and_ids(kind: str, device: str, *, blocks: bool) -> tuple[BuildModel, list[int]]:
    """What builds the model, and the ids it is run on."""
    if kind == "tiny":
        folder = ROOT / "models" / "hy3-tiny"
        from tokenizers import Tokenizer  # the product's worker path needs no tokenizer; this bench reads text

        text = Path(__file__).read_text()
        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[: PROMPT_TOKENS + DECODES]
        return lambda **options: load_model(folder, **options), ids
    with tempfile.TemporaryDirectory() as folder_name:
        (Path(folder_name) / "config.json").write_text(json.dumps(HY3 if kind == "full" else SMOLLM2))
        config = read_model_config(Path(folder_name))
    source = (_BlockSource if blocks else _KeptSource)(device, torch.bfloat16)
    if blocks:
        config = replace(config, quantization=StoredQuantization(QuantizationScheme.FP8, blocks=True))
    generator = torch.Generator().manual_seed(7)
    # The reference dequantises all experts in every chunk: one is enough there.
    tokens = (CHUNK if kind == "full" else PROMPT_TOKENS) + DECODES
    ids = torch.randint(0, config.vocab_size, (tokens,), generator=generator).tolist()
    return lambda **options: build_model(config, source, **options), ids


def check(kind: str, scheme_name: str, device: str) -> list[dict[str, Any]]:
    """The rows of one model in one scheme."""
    name, scheme = CASES[kind][0], SCHEMES[scheme_name]
    model, ids = model_and_ids(kind, device, blocks=scheme_name == "fp8-blocks")
    wanted = LOGIT_ROWS[kind]
    start = time.perf_counter()
    oracle = chunked_logits(scheme.build(model, "cpu", torch.float32), ids, wanted)
    if scheme.dtype == torch.float32:
        bar = 1e-4
    else:
        bar = 1.25 * relative_error(chunked_logits(scheme.build(model, "cpu"), ids, wanted), oracle)
    print(f"oracle: {time.perf_counter() - start:.1f} s on the CPU", flush=True)
    with _turn(device):
        ours = scheme.build(model, device)
    rows = compare(f"{name}, {scheme_name}", chunked_logits(ours, ids, wanted), oracle, bar)
    if kind == "tiny":
        expected, _ = generate(scheme.build(model, "cpu", torch.float32), ids)
        tokens, seconds = generate(ours, ids)
        same = sum(a == b for a, b in zip(tokens, expected, strict=True))
        rows.append(row(f"{name}, {scheme_name}: requests of 16 with the CPU's 64 greedy tokens", same, "", None, None))
        rows.append(row(f"{name}, {scheme_name}: step loop, 16 requests", 16 * 64 / seconds, "tokens/s", None, None))
    return rows


@torch.inference_mode()
def chunked_logits(model: DecoderLM, ids: list[int], rows_wanted: int) -> Tensor:
    """Logits, fp32 on the CPU ``[rows_wanted + DECODES, vocab]``: the prompt in chunks, its last rows, then decodes."""
    pages = list(range(-(-(len(ids)) // 64)))
    cache = model.new_kv_cache(len(pages))

    def run(tokens: list[int], start: int, decodes: int) -> Tensor:
        batch = ForwardBatch.pack([TokenRun(tokens, start, pages)], num_decodes=decodes, device=model.device)
        with _turn(model.device.type):
            return model.forward(batch, cache)

    prompt = ids[: len(ids) - DECODES]
    rows = [run(prompt[start : start + CHUNK], start, 0) for start in range(0, len(prompt), CHUNK)]
    hidden = [torch.cat(rows)[-rows_wanted:]]
    hidden += [run(ids[start : start + 1], start, 1) for start in range(len(prompt), len(ids))]
    return model.logits(torch.cat(hidden)).float().cpu()


def compare(name: str, got: Tensor, oracle: Tensor, bar: float) -> list[dict[str, Any]]:
    """Rows on the relative error and on likeliest tokens that differ where the oracle is sure."""
    error = relative_error(got, oracle)
    top = oracle.topk(2, dim=-1).values
    sure = (top[:, 0] - top[:, 1]) > 2 * (got - oracle).abs().amax(dim=-1)
    other = got.argmax(-1) != oracle.argmax(-1)
    where = f"{name} on the GPU against fp32 activations on the CPU"
    flips, count = int((other & sure).sum()), f"{int(sure.sum())} of {len(sure)}"
    return [
        row(f"{where}: relative error of the logits", error, "", bar, error <= bar),
        row(f"{where}: other likeliest token in the {count} sure rows", flips, "", 0, flips == 0),
        row(f"{where}: other likeliest token in any row", round(100 * other.float().mean().item(), 2), "%", None, None),
    ]


def relative_error(got: Tensor, oracle: Tensor) -> float:
    return float((got - oracle).norm() / oracle.norm())


def row(figure: str, value: float, unit: str, bar: float | None, met: bool | None) -> dict[str, Any]:
    print(
        f"{figure}: {value:.4g} {unit}" + ("" if met is None else f" (bar {bar}, {'met' if met else 'MISSED'})"),
        flush=True,
    )
    return {
        "figure": figure,
        "value": value,
        "unit": unit,
        "floor": None,
        "peer": None,
        "peer_value": None,
        "bar": bar,
        "met": met,
    }


def generate(model: DecoderLM, ids: list[int]) -> tuple[list[list[int]], float]:
    """64 greedy tokens for 16 prompts of 40 to 640 tokens through scheduler and runner, and the seconds it took."""
    pool = BlockPool(256)
    config = SchedulerConfig(max_model_tokens=2048, max_batch_tokens=512, max_sequences=16)
    scheduler = Scheduler(config, pool, time.monotonic)
    runner = Runner(model, 256, collectives=SingleRank())
    with _turn(model.device.type):
        runner.warm_up()
    for handle in range(16):
        prompt = array("I", ids[handle : 40 + 40 * handle])
        scheduler.add(Request(handle, prompt, ChainKey(b"m" * 32), Sampling(max_tokens=64, ignore_eos=True)))
    output: list[list[int]] = [[] for _ in range(16)]
    start = time.perf_counter()
    while (plan := scheduler.schedule()) is not None:
        with _turn(model.device.type):
            step = runner.run(plan)
        scheduler.commit(plan, step)
        for event in scheduler.take_outcome().tokens:
            output[event.handle] += event.tokens
    return output, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "engine_gpu.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="")
    parser.add_argument("--cases", default=",".join(f"{kind}.{scheme}" for kind in CASES for scheme in CASES[kind][1]))
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    os.environ.setdefault("GEMM_BENCH_LOCK", str(Path(tempfile.gettempdir()) / "engine-gpu.lock"))
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor()
    command = ["git", "rev-parse", "--short", "HEAD"]
    here = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()
    result: dict[str, Any] = {
        "gpu": gpu,
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "commit": options.commit or here,
        "command": "python3 bench/engine_gpu.py",
        "rows": [],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for case in options.cases.split(","):
        kind, _, scheme = case.partition(".")
        result["rows"] += check(kind, scheme, options.device)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return 0 if all(row["met"] is not False for row in result["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
