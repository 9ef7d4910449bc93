"""FlashInfer's way from the QKV product to e4m3 pages, timed for the cases of `qkv_post.py`.

Prints one JSON object, and writes it to the path it is given.

Three launches: RMSNorm of q, RMSNorm of k, and RoPE with quantising (one constant scale, not one a token and head) and
append (V as it lies, not token-contiguous). A process of its own, because FlashInfer is on the path of no other.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import flashinfer
import torch
from gemm_timing import BF16, E4M3, measuring, median_us, preparing
from katydid_kernels import rope_table
from qkv_post import DIM, EPS, L2_BYTES, POSITIONS, PUBLIC, Case, Layer


def chain(case: Case, layer: Layer, pages: tuple[torch.Tensor, ...], places: tuple[torch.Tensor, ...]) -> object:
    heads, end = layer.qkv.view(len(case.slots), -1, DIM), case.q_heads + case.kv_heads
    q, k, v = heads[:, : case.q_heads], heads[:, case.q_heads : end], heads[:, end:]
    indices, starts, rows, within = places
    return flashinfer.rope.rope_quantize_fp8_append_paged_kv_cache(
        flashinfer.rmsnorm(q, case.weight, EPS, enable_pdl=True),
        flashinfer.rmsnorm(k, case.weight, EPS, enable_pdl=True),
        None, None, v, case.table, case.positions, pages, indices, starts, rows, within,
        quant_scale_q=20.0, quant_scale_kv=20.0, page_size=64, enable_pdl=True,
    )  # fmt: skip


def time_case(case: Case) -> float:
    tokens = len(case.slots)
    with preparing():
        count = -(-tokens // 64)
        token = torch.arange(tokens, dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        places = (torch.randperm(count, device="cuda").int(), starts, token * 0, token)
        shape = (count, 64, case.kv_heads, DIM)
        sets = min(400, max(2, int(L2_BYTES / case.bytes_moved()) + 1))
        calls = []
        for _ in range(sets):
            pages = tuple(torch.zeros(shape, device="cuda").to(E4M3) for _ in range(2))
            width = (case.q_heads + 2 * case.kv_heads) * DIM
            qkv = torch.randn(tokens, width, device="cuda").to(BF16)
            calls.append(partial(chain, case, Layer(qkv, *pages), pages, places))
        calls[0]()
    with measuring():
        return median_us(calls)


def main() -> None:
    os.environ.setdefault("GEMM_BENCH_LOCK", tempfile.mkstemp()[1])
    with preparing():
        table = rope_table((11158840.0 ** -(torch.arange(0, DIM, 2) / DIM)).cuda(), POSITIONS)
    found = {
        f"{q_heads}/{kv_heads} {tokens}": time_case(Case.make(q_heads, kv_heads, tokens, E4M3, table))
        for q_heads, kv_heads, tokens in PUBLIC
    }
    text = json.dumps({"version": flashinfer.__version__, "us": found})
    print(text, flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
