"""How long one full-width MoE layer of Hy3 takes to quantise by data on one GPU.

    PYTHONPATH=kernels:services/engine:services/runtime:. python3 bench/quantize_layer.py [--experts 48]

The layer has random weights; its input is random rows, 128 sequences of 2,048 tokens by default, and every step of the
recipe's defaults is done: smoothing, GPTQ with drift and refitted scales, both streams moved behind the layer. Reading
the checkpoint and writing the result are not part of it. With fewer experts and sequences in proportion the time per
expert is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from katydid_engine.layers.rotary import rotary_table
from katydid_engine.model_config import ModelConfig
from katydid_engine.planning.known_models import KNOWN_MODELS
from katydid_engine.quantize import rounding, walk
from katydid_engine.quantize.block import Block, rotary_angles
from katydid_engine.quantize.recipe import Recipe
from torch import Tensor

TOKENS = 2048
BATCH = 16  # sequences
# Parts that are timed: what smoothing rounds counts twice.
PARTS: tuple[tuple[ModuleType, str], ...] = (
    (walk, "smooth"),
    (walk, "RoutedRows"),
    (walk, "follow_drift"),
    (walk, "output_error"),
    (rounding, "quantize_int4"),
    (rounding, "gptq"),
    (rounding, "refit_scales"),
)


def synthetic_layer(config: ModelConfig, device: str) -> Block:
    """Weights of deviation 0.02 and unit gains."""
    assert config.moe is not None
    generator = torch.Generator(device).manual_seed(0)

    def drawn(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, device=device).normal_(0.0, 0.02, generator=generator)

    hidden, width = config.hidden_size, config.moe.intermediate_size
    ones = torch.ones(hidden, device=device)
    tensors = {
        "input_layernorm.weight": ones,
        "post_attention_layernorm.weight": ones.clone(),
        "self_attn.q_norm.weight": torch.ones(config.head_dim, device=device),
        "self_attn.k_norm.weight": torch.ones(config.head_dim, device=device),
        "self_attn.q_proj.weight": drawn(config.num_heads * config.head_dim, hidden),
        "self_attn.k_proj.weight": drawn(config.num_kv_heads * config.head_dim, hidden),
        "self_attn.v_proj.weight": drawn(config.num_kv_heads * config.head_dim, hidden),
        "self_attn.o_proj.weight": drawn(hidden, config.num_heads * config.head_dim),
        "mlp.router.gate.weight": drawn(config.moe.num_experts, hidden),
        "mlp.expert_bias": torch.zeros(config.moe.num_experts, device=device),
    }
    for block in ("mlp.shared_mlp", *(f"mlp.experts.{expert}" for expert in range(config.moe.num_experts))):
        tensors[f"{block}.gate_proj.weight"] = drawn(width, hidden)
        tensors[f"{block}.up_proj.weight"] = drawn(width, hidden)
        tensors[f"{block}.down_proj.weight"] = drawn(hidden, width)
    return Block(config, tensors, sparse=True)


class Clock:
    """Seconds of the parts of a walk, each between two moments at which the device is idle."""

    def __init__(self, device: str) -> None:
        self.seconds: dict[str, float] = {}
        self._cuda = device == "cuda"

    def now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            start = self.now()
            made = work(*args, **named)
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start
            return made

        return call


def _every(_name: str) -> bool:
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=192)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--output", help="a JSON file for the result")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hy3 = KNOWN_MODELS["hy3"]
    assert hy3.moe is not None
    config = dataclasses.replace(hy3, moe=dataclasses.replace(hy3.moe, num_experts=options.experts))
    generator = torch.Generator(device).manual_seed(1)
    rows = [
        torch.empty(min(BATCH, options.sequences - begin), TOKENS, config.hidden_size, device=device).normal_(
            generator=generator
        )
        for begin in range(0, options.sequences, BATCH)
    ]
    streams = walk.Streams(list(rows), list(rows))
    del rows
    angles = rotary_angles(rotary_table(config.rope, config.head_dim, TOKENS, torch.device(device)), TOKENS)
    clock = Clock(device)
    for module, name in PARTS:
        setattr(module, name, clock.timed(name, getattr(module, name)))
    blocks = [synthetic_layer(config, device)]  # not held while it is quantised
    start = clock.now()
    with torch.no_grad():
        walk.quantise_layer(blocks.pop(), streams, angles, Recipe(), int4=_every, gain_dtype=torch.bfloat16)
    total = clock.now() - start
    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "experts": options.experts,
        "tokens": options.sequences * TOKENS,
        "seconds": round(total, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device == "cuda" else None,
        "parts": {name: round(seconds, 2) for name, seconds in clock.seconds.items()},
    }
    print(json.dumps(result, indent=1))
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
