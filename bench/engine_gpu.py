"""The same engine code on a GPU and on the CPU: logits side by side, and the step loop generating.

    PYTHONPATH=kernels:services/engine:services/runtime python3 bench/engine_gpu.py [--json FILE]

Two models: hy3-tiny as shipped, and Hy3 at full width cut to its first two layers (one dense, one MoE of 192 experts)
with random weights, whose router has many near ties, so that rounding anywhere changes experts. The oracle is the
reference path, fp32 on the CPU, on the same weights rounded to bf16. Bars, as errors of the logits relative to their
norm: an fp32 GPU run within 1e-4; a bf16 GPU run within 1.25 times the error of the reference path in bf16 on the CPU;
and the same likeliest token wherever the oracle's first two are further apart than twice the row's largest error.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
import time
from array import array
from pathlib import Path

import torch
import triton
from katydid_engine.block_pool import BlockPool
from katydid_engine.collectives import SingleRank
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import build_model, load_model
from katydid_engine.model_config import read_model_config
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.request import Request, Sampling
from katydid_engine.runner import Runner
from katydid_engine.scheduler import Scheduler, SchedulerConfig
from katydid_engine.weights import RandomSource
from katydid_runtime.block_hash import ChainKey
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
PROMPT_TOKENS, CHUNK, DECODES, LOGIT_ROWS = 1000, 512, 4, 64
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


@torch.inference_mode()
def chunked_logits(model: DecoderLM, ids: list[int]) -> Tensor:
    """Logits, fp32 on the CPU ``[LOGIT_ROWS + DECODES, vocab]``: the prompt in chunks, its last rows, then decodes."""
    pages = list(range(-(-(len(ids)) // 64)))
    cache = model.new_kv_cache(len(pages))
    rows: list[Tensor] = []
    prompt = ids[: len(ids) - DECODES]
    for start in range(0, len(prompt), CHUNK):
        batch = ForwardBatch.pack([TokenRun(prompt[start : start + CHUNK], start, pages)], device=model.device)
        rows.append(model.forward(batch, cache))
    hidden = [torch.cat(rows)[-LOGIT_ROWS:]]
    for start in range(len(prompt), len(ids)):
        run = TokenRun(ids[start : start + 1], start, pages)
        hidden.append(model.forward(ForwardBatch.pack([run], num_decodes=1, device=model.device), cache))
    return model.logits(torch.cat(hidden)).float().cpu()


def compare(name: str, dtype: str, got: Tensor, oracle: Tensor, bar: float) -> list[dict[str, object]]:
    """Rows on the relative error and on likeliest tokens that differ where the oracle is sure."""
    error = relative_error(got, oracle)
    top = oracle.topk(2, dim=-1).values
    sure = (top[:, 0] - top[:, 1]) > 2 * (got - oracle).abs().amax(dim=-1)
    other = got.argmax(-1) != oracle.argmax(-1)
    where = f"{name}, {dtype} on the GPU against fp32 on the CPU"
    flips = int((other & sure).sum())
    return [
        row(f"{where}: relative error of the logits", error, "", bar, error <= bar),
        row(
            f"{where}: other likeliest token in the {int(sure.sum())} of {len(sure)} sure rows",
            flips,
            "",
            0,
            flips == 0,
        ),
        row(f"{where}: other likeliest token in any row", round(100 * other.float().mean().item(), 2), "%", None, None),
    ]


def relative_error(got: Tensor, oracle: Tensor) -> float:
    return ((got - oracle).norm() / oracle.norm()).item()


def bars(bf16_error: float) -> tuple[tuple[torch.dtype, float], ...]:
    """What the GPU runs are held to, given the reference path's own bf16 error."""
    return (torch.float32, 1e-4), (torch.bfloat16, 1.25 * bf16_error)


def row(figure: str, value: float, unit: str, bar: float | None, met: bool | None) -> dict[str, object]:
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


def check_full_width(device: str) -> list[dict[str, object]]:
    """Two layers of Hy3 with the same random bf16 weights on both sides."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(HY3))
        config = read_model_config(Path(folder))
    source = RandomSource(device, torch.bfloat16)
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, config.vocab_size, (PROMPT_TOKENS + DECODES,), generator=generator).tolist()
    start = time.perf_counter()
    oracle = chunked_logits(build_model(config, source, device="cpu", dtype=torch.float32), ids)
    bf16 = chunked_logits(build_model(config, source, device="cpu", dtype=torch.bfloat16), ids)
    print(f"oracle: {time.perf_counter() - start:.1f} s on the CPU", flush=True)
    rows = []
    for dtype, bar in bars(relative_error(bf16, oracle)):
        model = build_model(config, source, device=device, dtype=dtype)
        rows += compare(
            "Hy3, 2 layers at full width", str(dtype).split(".")[1], chunked_logits(model, ids), oracle, bar
        )
        del model
        torch.cuda.empty_cache()
    return rows


def check_tiny(device: str) -> list[dict[str, object]]:
    """hy3-tiny on held text: logits, then the scheduler and runner generating greedily for 16 requests."""
    folder = ROOT / "models" / "hy3-tiny"
    from tokenizers import Tokenizer  # the product's worker path needs no tokenizer; this bench reads text

    text = Path(__file__).read_text()
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[: PROMPT_TOKENS + DECODES]
    reference = load_model(folder, device="cpu", dtype=torch.float32)
    oracle = chunked_logits(reference, ids)
    expected, _ = generate(reference, ids)
    bf16 = chunked_logits(load_model(folder, device="cpu", dtype=torch.bfloat16), ids)
    rows = []
    for dtype, bar in bars(relative_error(bf16, oracle)):
        model = load_model(folder, device=device, dtype=dtype)
        name = str(dtype).split(".")[1]
        rows += compare("hy3-tiny", name, chunked_logits(model, ids), oracle, bar)
        tokens, seconds = generate(model, ids)
        same = sum(a == b for a, b in zip(tokens, expected, strict=True))
        rows.append(row(f"hy3-tiny, {name}: requests of 16 with the CPU's 64 greedy tokens", same, "", None, None))
        rows.append(row(f"hy3-tiny, {name}: step loop, 16 requests", 16 * 64 / seconds, "tokens/s", None, None))
    return rows


def generate(model: DecoderLM, ids: list[int]) -> tuple[list[list[int]], float]:
    """64 greedy tokens for 16 prompts of 40 to 640 tokens through scheduler and runner, and the seconds it took."""
    pool = BlockPool(256)
    config = SchedulerConfig(max_model_tokens=2048, max_batch_tokens=512, max_sequences=16)
    scheduler = Scheduler(config, pool, time.monotonic)
    runner = Runner(model, 256, collectives=SingleRank())
    runner.warm_up()
    for handle in range(16):
        prompt = array("I", ids[handle : 40 + 40 * handle])
        scheduler.add(Request(handle, prompt, ChainKey(b"m" * 32), Sampling(max_tokens=64, ignore_eos=True)))
    output: list[list[int]] = [[] for _ in range(16)]
    start = time.perf_counter()
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(plan, runner.run(plan))
        for event in scheduler.take_outcome().tokens:
            output[event.handle] += event.tokens
    return output, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "engine_gpu.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="")
    parser.add_argument("--only", choices=["tiny", "full"], default=None)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows: list[dict[str, object]] = []
    if options.only != "full":
        rows += check_tiny(options.device)
    if options.only != "tiny":
        rows += check_full_width(options.device)
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor()
    commit = (
        options.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
        ).stdout.strip()
    )
    result = {
        "gpu": gpu,
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "commit": commit,
        "command": "python3 bench/engine_gpu.py",
        "rows": rows,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(r["met"] is not False for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
