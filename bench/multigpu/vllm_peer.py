"""vLLM on the same layers and GPUs: times to a first token and of a decode step, for ``run.py`` to set beside its own.

    python bench/multigpu/vllm_peer.py --gpus 8 --layers 16        writes bench/results/multigpu_8_vllm.json
    python bench/multigpu/vllm_peer.py --gpus 8 --dry --out FOLDER    the same calls, to something that answers at once

As its users run it: weights and KV in fp8, tensor parallel, torch.compile and CUDA graphs on. Its Triton experts have
no configuration for Hy3's shapes: ``--tuned`` is a folder of those that vLLM's own tuning script found. Weights are
random (``load_format="dummy"``), its scheduler is within the times. Needs vLLM 0.26, not Katydid.

Its random weights draw the experts' biases as wide as everything else and norms' weights a thousand times too small:
all tokens would choose the same eight experts of a layer. So norms are set to one and biases to nothing, as far as
the choice goes; then experts are chosen about evenly, as Katydid's are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT, STEPS, LONG = 4096, 64, 65536
CHUNKS = [8192, 32768]
NAME = "multigpu_{}_vllm.json"
HY3 = {
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "vocab_size": 120832,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0},
    "qk_norm": True,
    "tie_word_embeddings": False,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "expert_hidden_dim": 1536,
    "moe_intermediate_size": 1536,
    "moe_router_enable_expert_bias": True,
    "moe_router_use_sigmoid": True,
    "route_norm": True,
    "router_scaling_factor": 2.826,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.006,
    "enable_lm_head_fp32": False,
    "enable_moe_fp32_combine": False,
}
Found = dict[str, Any]


def start(gpus: int, layers: int, batches: list[int], chunk: int, folder: Path, **more: Any) -> Any:
    from vllm import LLM

    (folder / "config.json").write_text(json.dumps({**HY3, "num_hidden_layers": layers}))
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        quantization="fp8",
        kv_cache_dtype="fp8",
        tensor_parallel_size=gpus,
        max_model_len=140_000,
        max_num_batched_tokens=chunk,
        max_num_seqs=max(batches, default=1),
        # The fusion's default way over FlashInfer is NVLink multicast.
        compilation_config={"cudagraph_capture_sizes": batches or [1], "pass_config": {"fuse_allreduce_rms": False}},
        disable_log_stats=True,
        **more,
    )


def choose_evenly(model: Any) -> int:
    """In each worker, in place; the number of tensors that were set."""
    import torch

    count = 0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
            elif name.endswith("expert_bias"):
                weight.zero_()
            else:
                continue
            count += 1
    return count


class Measured:
    """Prompts that share nothing, unless they are asked again."""

    def __init__(self, llm: Any, sampling: Callable[..., Any]) -> None:
        self._llm, self._sampling, self._number = llm, sampling, 0

    def ttft_s(self, tokens: int, calls: int) -> float:
        return sorted(self._seconds([self._prompt(tokens)], 1) for _ in range(calls))[(calls - 1) // 2]

    def step_s(self, batch: int) -> float:
        """What ``STEPS`` more tokens of prompts that are cached take, each."""
        prompts = [self._prompt(CONTEXT) for _ in range(batch)]
        self._seconds(prompts, 1)
        first = min(self._seconds(prompts, 1) for _ in range(3))
        return (min(self._seconds(prompts, 1 + STEPS) for _ in range(2)) - first) / STEPS

    def _prompt(self, tokens: int) -> list[int]:
        self._number += 1
        return [(7 + self._number * 13 + index * 17) % 60_000 + 100 for index in range(tokens)]

    def _seconds(self, prompts: list[list[int]], tokens: int) -> float:
        # Drawn, for the best tokens of random weights are alike: then all requests would choose the same experts.
        sampling = self._sampling(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - started


def measure(llm: Any, sampling: Callable[..., Any], lengths: list[int], batches: list[int], tell: Any = print) -> Found:
    """``sampling`` makes what ``llm`` takes of how to sample."""
    measured = Measured(llm, sampling)
    measured.ttft_s(min(lengths), 2)
    found: Found = {"ttft_ms": {}, "step_ms": {}}
    sizes = [(tokens, "ttft_ms", tokens) for tokens in lengths]
    sizes += [(batch * CONTEXT, "step_ms", batch) for batch in batches]
    for _, kind, size in sorted(sizes):  # those with the least to compute first
        seconds = measured.step_s(size) if kind == "step_ms" else measured.ttft_s(size, 2 if size > LONG else 3)
        found[kind][str(size)] = round(1e3 * seconds, 3)
        tell(json.dumps(found), flush=True)
    return found


class Absent:
    """In vLLM's place in a dry run."""

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, *, use_tqdm: bool) -> None:
        assert prompts
        assert sampling["max_tokens"] > 0
        assert not use_tqdm


def of_vllm(options: argparse.Namespace) -> tuple[str, Found]:
    """Its version, and what was measured."""
    # No NVLink multicast, as in Katydid's runs.
    os.environ |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for a function that workers carry out
    if options.tuned is not None:
        os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(options.tuned)
    import vllm

    (chunk,) = options.chunks
    with tempfile.TemporaryDirectory() as folder:
        llm = start(options.gpus, options.layers, options.batches, chunk, Path(folder))
        llm.apply_model(choose_evenly)
        return str(vllm.__version__), measure(llm, vllm.SamplingParams, options.lengths, options.batches)


def absent(options: argparse.Namespace) -> tuple[str, Found]:
    return "none", measure(Absent(), dict, options.lengths[:1], options.batches[:2])


def apart(options: argparse.Namespace) -> Found:
    """What a process of its own finds for each number of tokens at once: the first with all prompts, and steps; others
    with prompts that are as long."""
    by_chunk: dict[int, Found] = {}
    for chunk in options.chunks:
        lengths = [str(length) for length in options.lengths if not by_chunk or length >= chunk]
        if not lengths:
            continue
        with tempfile.TemporaryDirectory() as folder:
            more = ["--chunks", str(chunk), "--lengths", *lengths, "--out", folder]
            more += ["--batches"] if by_chunk else []
            subprocess.run([sys.executable, *sys.argv, *more], check=True)
            by_chunk[chunk] = json.loads((Path(folder) / NAME.format(options.gpus)).read_text())
    return next(iter(by_chunk.values())) | best_of(by_chunk)


def best_of(by_chunk: dict[int, Found]) -> Found:
    """Steps of the first; of each prompt the least time, and in chunks of how many tokens it was found."""
    found: Found = {"ttft_ms": {}, "step_ms": next(iter(by_chunk.values()))["step_ms"], "chunk": {}}
    for chunk, measured in by_chunk.items():
        for length, took_ms in measured["ttft_ms"].items():
            if took_ms < found["ttft_ms"].get(length, float("inf")):
                found["ttft_ms"][length], found["chunk"][length] = took_ms, chunk
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768, 131072])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32, 64, 128])
    parser.add_argument("--chunks", nargs="+", type=int, default=CHUNKS, help="tokens of a prompt computed at once")
    parser.add_argument("--tuned", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if len(options.chunks) > 1:
        found = apart(options)
    else:
        version, found = absent(options) if options.dry else of_vllm(options)
        how = f"tensor_parallel_size={options.gpus}, FP8, torch.compile and CUDA graphs, experts "
        how += "tuned" if options.tuned is not None else "not tuned"
        how += ", chosen evenly, no all-reduce fusion (NVLink multicast)"
        found |= {"version": version, "layers": options.layers, "how": how}
    (options.out / NAME.format(options.gpus)).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
