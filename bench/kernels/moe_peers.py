"""Public kernels for the same routed experts, in the same run: vLLM's Triton experts, tuned for these shapes on this
GPU, vLLM's CUTLASS experts, and DeepGEMM's grouped products.

They take what their libraries hand them: vLLM's Triton experts quantise x on the way, none adds a shared expert's
output. `search` measures configurations for every size, the library's default among them; the best of them stand in
``bench/results/moe_triton_configs.json``, and that is what `triton` times.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from expert_draws import TOP_K, draw_ids
from gemm_timing import BF16, E4M3, compiling, measuring, median_us, preparing
from torch import Tensor

__all__ = ["PEER_SIZES", "cutlass", "deepgemm", "search", "triton"]

CONFIGS = Path(__file__).parent.parent / "results" / "moe_triton_configs.json"
HIDDEN = 4096
PEER_SIZES = {"TP8": (1, 4, 16, 64, 256, 1024, 4096, 16384), "EP8": (16, 64, 128, 1024)}
SHAPES = {"TP8": (192, 192), "EP8": (24, 1536)}
ONE, WEIGHT_SCALE = 0.05, 0.02
Found = dict[str, Any]


class _Batch:
    """Operands as vLLM takes them, for the experts that ours are timed on."""

    def __init__(self, shard: str, tokens: int, weights: list[tuple[Tensor, Tensor]]) -> None:
        experts = SHAPES[shard][0]
        self.x = torch.randn(tokens, HIDDEN, device="cuda", dtype=BF16)
        self.weights = torch.rand(tokens, TOP_K, device="cuda")
        self.ids = draw_ids(tokens, experts)
        self.experts = weights

    def calls(self, call: Callable[..., object]) -> list[Callable[[], object]]:
        return [partial(call, self.x, *pair, self.weights, ids) for ids in self.ids for pair in self.experts]


def _weights(shard: str) -> list[tuple[Tensor, Tensor]]:
    experts, width = SHAPES[shard]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=BF16).to(E4M3)

    return [(draw(experts, 2 * width, HIDDEN), draw(experts, HIDDEN, width)) for _ in range(2)]


def candidates(tokens: int, experts: int) -> list[dict[str, int]]:
    """The configurations searched for a batch: what fits the GPU of those a tuner would try around the default."""
    rows = tokens * TOP_K / experts
    if rows <= 4:
        grid = itertools.product((16,), (32, 64, 128), (128, 256), (1,), (4,), (3, 4, 5))
    elif rows <= 48:
        grid = itertools.product((16, 32, 64), (64, 128), (128, 256), (1,), (4,), (3, 4))
    else:
        grid = itertools.product((64, 128), (128, 256), (64, 128), (1, 16), (4, 8), (3, 4))
    found = []
    for m, n, k, group, warps, stages in grid:
        wide = m * n >= 128 * 128
        if (m + n) * k * stages <= 220 * 1024 and not (wide and warps == 4) and not (m * n <= 64 * 128 and warps == 8):
            names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
            found.append({**dict(zip(names, (m, n, k, group, warps, stages), strict=True)), "SPLIT_K": 1})
    return found


def _triton_call(shard: str) -> Callable[..., object]:
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    scale = torch.full((SHAPES[shard][0],), WEIGHT_SCALE, device="cuda")
    one = torch.full((1,), ONE, device="cuda")
    config = fp8_w8a8_moe_quant_config(w1_scale=scale, w2_scale=scale, a1_scale=one, a2_scale=one)
    return partial(fused_experts, quant_config=config)


@contextlib.contextmanager
def _configured(config: dict[str, int] | None) -> Iterator[None]:
    from vllm.model_executor.layers.fused_moe import override_config

    with override_config(config) if config else contextlib.nullcontext():
        yield


def search(shard: str) -> Found:
    """Every size's best configuration. Time on the GPU: some 10 s a shard."""
    call = _triton_call(shard)
    with preparing():
        weights = _weights(shard)
        batches = {tokens: _Batch(shard, tokens, weights) for tokens in PEER_SIZES[shard]}
    found: Found = {}
    for tokens, batch in batches.items():
        calls, times = batch.calls(call)[:12], {}
        for config in (None, *candidates(tokens, SHAPES[shard][0])):
            with contextlib.suppress(Exception), _configured(config):  # a configuration may not fit the GPU
                with compiling():
                    calls[0]()
                with measuring():
                    times[json.dumps(config)] = median_us(calls, 3)
        best = min(times, key=lambda name: times[name])
        found[str(tokens)] = {"config": json.loads(best), "default_us": times["null"], "us": times[best]}
    return found


def triton(shard: str) -> Found:
    """vLLM's Triton experts with the configurations found."""
    call, configs = _triton_call(shard), json.loads(CONFIGS.read_text())[shard]
    with preparing():
        weights = _weights(shard)
    found: Found = {}
    for tokens in PEER_SIZES[shard]:
        with preparing():
            batch = _Batch(shard, tokens, weights)
        with _configured(configs[str(tokens)]["config"]):
            with compiling():
                batch.calls(call)[0]()
            with measuring():
                found[str(tokens)] = round(median_us(batch.calls(call), 15), 1)
    return {"us": found, "rows": []}


def cutlass(shard: str) -> Found:
    """vLLM's CUTLASS experts, x quantised before."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import run_cutlass_moe_fp8
    from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import MoEPermuteScratch

    experts, width = SHAPES[shard]
    device = torch.device("cuda")
    scale, one = torch.full((experts, 1), WEIGHT_SCALE, device=device), torch.full((1,), ONE, device=device)
    strides = {n: torch.full((experts,), n, device=device, dtype=torch.int64) for n in (HIDDEN, width, 2 * width)}
    with preparing():
        weights = _weights(shard)
    found: Found = {}
    for tokens in PEER_SIZES[shard]:
        with preparing():
            batch = _Batch(shard, tokens, weights)
            x, out = batch.x.to(E4M3), torch.empty_like(batch.x)
            scratch = [torch.empty(tokens * TOP_K * max(2 * width, HIDDEN), device=device, dtype=BF16) for _ in "12"]
            permutation = MoEPermuteScratch(
                max_num_tokens=tokens, topk=TOP_K, num_experts=experts, num_local_experts=experts, device=device
            )

        fixed = (out, x, scale, one, [strides[n] for n in (HIDDEN, width, 2 * width, HIDDEN)], scratch, permutation)
        call = partial(_run_cutlass, run_cutlass_moe_fp8, MoEActivation.SILU, experts, fixed)
        with measuring():
            found[str(tokens)] = round(median_us(batch.calls(call), 15), 1)
    return {"us": found, "rows": []}


def _run_cutlass(
    run: Callable[..., None], activation: Any, experts: int, fixed: tuple[Any, ...],
    _: Tensor, w13: Tensor, w2: Tensor, router_weights: Tensor, ids: Tensor,
) -> None:  # fmt: skip
    out, x, scale, one, strides, scratch, permutation = fixed
    run(
        out, x, w13, w2, ids, activation, experts, None, scale, scale, one, one, *strides, *scratch, None, BF16,
        False, False, False, router_weights, permutation,
    )  # fmt: skip


def deepgemm() -> Found:
    """DeepGEMM's two grouped products of EP8, 1,024 tokens, with scales of blocks, rows padded to its tile: a part of
    the layer, without routing, SwiGLU, quantisation and sum."""
    import deep_gemm

    experts, width = SHAPES["EP8"]
    rows = 384 * experts
    group = torch.arange(experts, device="cuda", dtype=torch.int32).repeat_interleave(384)
    found: Found = {}
    for name, n, k in (("gate-up", 2 * width, HIDDEN), ("down", HIDDEN, width)):
        with preparing():
            a = (torch.randn(rows, k, device="cuda").to(E4M3), torch.rand(rows, k // 128, device="cuda"))
            b = [
                (torch.randn(experts, n, k, device="cuda", dtype=BF16).to(E4M3),
                 torch.rand(experts, n // 128, k // 128, device="cuda"))
                for _ in range(2)
            ]  # fmt: skip
            out = torch.empty(rows, n, device="cuda", dtype=BF16)
            calls = [partial(deep_gemm.m_grouped_fp8_gemm_nt_contiguous, a, each, out, group) for each in b]
            calls[0]()
        with measuring():
            us = median_us(calls, 15)
        found[name] = {"us": round(us, 1), "TFLOP/s": round(2e-6 * rows * n * k / us)}
    return {"rows padded": rows, **found, "rows": []}
