"""Measures qkv_post against its bars on one Hopper GPU, beside the chain of torch operations in the same run.

    PYTHONPATH=kernels:bench/kernels python bench/kernels/qkv_post.py --out bench/results

The chain is what one writes without the kernel: norm, RoPE, quantisation, two indexed stores; as it is and through
torch.compile, both in a CUDA graph. FlashInfer's figures come from `qkv_post_peer.py`, run before. Correctness is
`tests/kernels/test_qkv_post_gpu.py`; here the stored bytes are compared with the chain's once before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from gemm_timing import BF16, COPY_TB_PER_S, E4M3, Row, measuring, median_us, preparing, row
from katydid_kernels import qkv_post, qkv_post_fp8, rope_table
from results_file import replace_rows
from torch import Tensor

DIM, EPS, POSITIONS = 128, 1e-5, 262144
L2_BYTES = 120e6
# (q heads, kv heads, tokens): best public kernel measured earlier on this GPU, us.
PUBLIC = {
    (64, 8, 1): 6.8, (64, 8, 64): 7.6, (64, 8, 8192): 115.0, (64, 8, 32768): 433.0,
    (8, 1, 1): 6.7, (8, 1, 64): 7.0, (8, 1, 8192): 21.0, (8, 1, 32768): 62.5,
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    qkv: Tensor
    k_pages: Tensor
    v_pages: Tensor


@dataclass(frozen=True)
class Case:
    """Heads, and what all layers share."""

    q_heads: int
    kv_heads: int
    dtype: torch.dtype
    table: Tensor
    positions: Tensor
    slots: Tensor
    weight: Tensor
    scale: Tensor

    @staticmethod
    def make(q_heads: int, kv_heads: int, tokens: int, dtype: torch.dtype, table: Tensor) -> Case:
        pages = tokens // 64 + 2
        start = int(torch.randint(0, POSITIONS - tokens, ()))
        # A prompt: pages in random order, tokens in order within a page.
        order = torch.randperm(pages, device="cuda")
        token = torch.arange(tokens, device="cuda")
        slots = (order[token // 64] * 64 + token % 64).int()
        if tokens <= 64:
            slots = torch.randperm(pages * 64, device="cuda")[:tokens].int()
        return Case(
            q_heads, kv_heads, dtype, table, (start + token).int(), slots,
            torch.rand(DIM, device="cuda").to(BF16) + 0.5, torch.tensor([0.05], device="cuda"),
        )  # fmt: skip

    def layer(self) -> Layer:
        tokens = len(self.slots)
        pages = tokens // 64 + 2
        width = (self.q_heads + 2 * self.kv_heads) * DIM
        return Layer(
            torch.randn(tokens, width, device="cuda").to(BF16),
            torch.zeros(pages, self.kv_heads, 64, DIM, device="cuda").to(self.dtype),
            torch.zeros(pages, self.kv_heads, DIM, 64, device="cuda").to(self.dtype),
        )

    def fused(self, layer: Layer) -> object:
        common = {
            "q_norm_weight": self.weight, "k_norm_weight": self.weight, "qk_norm": "before_rope", "eps": EPS,
            "overlap": True,
        }  # fmt: skip
        places = (self.table, self.positions, self.slots, layer.k_pages, layer.v_pages)
        if self.dtype == BF16:
            return qkv_post(layer.qkv, *places, **common)  # type: ignore[arg-type]
        return qkv_post_fp8(layer.qkv, *places, k_scale=self.scale, v_scale=self.scale, **common)  # type: ignore[arg-type]

    def chain(self, layer: Layer) -> object:
        heads = layer.qkv.view(len(self.slots), -1, DIM)
        qk, v = heads[:, : self.q_heads + self.kv_heads], heads[:, self.q_heads + self.kv_heads :]
        qk = torch.nn.functional.rms_norm(qk, (DIM,), self.weight, EPS).float()
        cos, sin = self.table[self.positions.long()].unsqueeze(1).chunk(2, -1)
        first, second = qk.chunk(2, -1)
        qk = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        q, k = qk[:, : self.q_heads], qk[:, self.q_heads :]
        scale = None
        if self.dtype == E4M3:
            scale = (q.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
            q = q / scale
            k = (k / self.scale).clamp(-448, 448)
            v = (v.float() / self.scale).clamp(-448, 448)
        page, offset = self.slots.long() // 64, self.slots.long() % 64
        layer.k_pages[page, :, offset, :] = k.to(self.dtype)
        layer.v_pages[page, :, :, offset] = v.to(self.dtype)
        return q.to(self.dtype), scale

    def bytes_moved(self) -> int:
        width = (self.q_heads + 2 * self.kv_heads) * DIM
        scales = 4 * self.q_heads if self.dtype == E4M3 else 0
        return len(self.slots) * (2 * width + self.dtype.itemsize * width + scales)


def same_pages(case: Case) -> bool:
    """Fused and chain store the same but for one step of rounding in few places."""
    layers = [case.layer() for _ in range(2)]
    layers[1].qkv.copy_(layers[0].qkv)
    case.fused(layers[0])
    case.chain(layers[1])
    pairs = [(layers[0].k_pages, layers[1].k_pages), (layers[0].v_pages, layers[1].v_pages)]
    error = max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)
    return bool(error < (2e-2 if case.dtype == E4M3 else 4e-3))


def time_case(case: Case, compiled: Callable[[Layer], object] | None, flashinfer: dict[str, float]) -> list[Row]:
    tokens = len(case.slots)
    with preparing():
        if not same_pages(case):
            return [row(f"qkv_post {tokens} tokens: pages differ", 0, "us", 0, None, None, None)]
        layers = [case.layer() for _ in range(min(400, max(2, int(L2_BYTES / case.bytes_moved()) + 1)))]
        if compiled is not None:
            compiled(layers[0])
    few = tokens <= 64
    with measuring():
        us = median_us([partial(case.fused, layer) for layer in layers])
        chain_us = median_us([partial(case.chain, layer) for layer in layers[:8]], 7)
        compiled_us = None
        if compiled is not None:
            compiled_us = median_us([partial(compiled, layer) for layer in layers[:8]], 7)
    floor = 1e-6 * case.bytes_moved() / COPY_TB_PER_S
    name = f"qkv_post {case.q_heads}/{case.kv_heads} heads {'fp8' if case.dtype == E4M3 else 'bf16'}, {tokens} tokens"
    public = PUBLIC.get((case.q_heads, case.kv_heads, tokens)) if case.dtype == E4M3 else None
    rows = [row(name, us, "us", floor, 3 if few else None, "best public kernel, measured earlier", public)]
    rows.append(row(f"{name}: times faster than the torch chain", chain_us / us, "x", 1, None, None, None))
    if compiled_us is not None:
        figure = f"{name}: times faster than the compiled chain"
        rows.append(row(figure, compiled_us / us, "x", 1, None if few else 5, None, None))
    flashinfer_us = flashinfer.get(f"{case.q_heads}/{case.kv_heads} {tokens}") if case.dtype == E4M3 else None
    if flashinfer_us is not None:
        figure = f"{name}: times faster than norm + norm + RoPE, quantise, append"
        rows.append(row(figure, flashinfer_us / us, "x", 1, None, "FlashInfer 0.6.14, us", flashinfer_us))
    if not few:
        wide = case.q_heads == 64 and case.dtype == E4M3
        share = 100 * floor / us
        rows.append(row(f"{name}: share of copy bandwidth", share, "%", 100, 82 if wide else None, None, None))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--compile", action="store_true", help="time the chain through torch.compile too")
    parser.add_argument("--peer", type=Path, help="what qkv_post_peer.py printed")
    arguments = parser.parse_args()
    flashinfer = json.loads(arguments.peer.read_text())["us"] if arguments.peer else {}
    os.environ.setdefault("GEMM_BENCH_LOCK", tempfile.mkstemp()[1])
    torch.manual_seed(0)
    with preparing():
        table = rope_table((11158840.0 ** -(torch.arange(0, DIM, 2) / DIM)).cuda(), POSITIONS)
    rows: list[Row] = []
    for q_heads, kv_heads, tokens, dtype in [
        (64, 8, 1, E4M3), (64, 8, 16, E4M3), (64, 8, 64, E4M3), (8, 1, 1, E4M3), (8, 1, 64, E4M3),
        (64, 8, 8192, E4M3), (64, 8, 32768, E4M3), (8, 1, 8192, E4M3), (8, 1, 32768, E4M3),
        (64, 8, 64, BF16), (64, 8, 8192, BF16),
    ]:  # fmt: skip
        case = Case.make(q_heads, kv_heads, tokens, dtype, table)
        compiled = torch.compile(case.chain) if arguments.compile and tokens in (64, 8192) and q_heads == 64 else None
        for found in time_case(case, compiled, flashinfer):
            print(json.dumps(found), flush=True)
            rows.append(found)
    replace_rows(arguments.out / "fused.json", rows, "qkv_post.py")


if __name__ == "__main__":
    main()
