"""Other attention kernels on the same batches: FA3 as vLLM ships it, and cuDNN through torch.

FA3 wants tokens first in both pages, `[pages, 64, kv_heads, head_dim]`: a peer pool is a rearranged copy of ours.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch
from attention_cases import BF16, FP8, Decode, Pool, Prefill, time_graph
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def fa3_available() -> bool:
    """Whether vLLM's flash-attention package is on the path."""
    return importlib.util.find_spec("vllm") is not None


class Fa3:
    """FA3 with its scheduler metadata made ahead, as vLLM runs it; best of its own split choice and 32 splits."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.k = pool.k.transpose(1, 2).contiguous()
        self.v = pool.v.permute(0, 3, 1, 2).contiguous()
        self.api = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")

    def _calls(self, q: Tensor, lens: list[int], q_len: int, splits: int) -> list[Callable[[], object]]:
        heads, kv_heads, rows = q.shape[1], self.pool.kv_heads, len(lens)
        used = torch.tensor(lens, dtype=torch.int32, device="cuda")
        cu = torch.arange(0, rows * q_len + 1, q_len, dtype=torch.int32, device="cuda")
        metadata = self.api.get_scheduler_metadata(
            batch_size=rows,
            max_seqlen_q=q_len,
            max_seqlen_k=max(lens),
            num_heads_q=heads,
            num_heads_kv=kv_heads,
            headdim=q.shape[2],
            cache_seqlens=used,
            qkv_dtype=q.dtype,
            cu_seqlens_q=cu,
            page_size=64,
            causal=True,
            num_splits=splits,
        )
        scales = {}
        if q.dtype == FP8:
            ones = torch.ones(rows, kv_heads, device="cuda")
            scales = {"q_descale": ones, "k_descale": ones, "v_descale": ones}
        out = torch.empty_like(q, dtype=BF16)

        def call(table: Tensor) -> object:
            return self.api.flash_attn_varlen_func(
                q,
                self.k,
                self.v,
                max_seqlen_q=q_len,
                cu_seqlens_q=cu,
                max_seqlen_k=max(lens),
                seqused_k=used,
                causal=True,
                block_table=table,
                out=out,
                scheduler_metadata=metadata,
                num_splits=splits,
                fa_version=3,
                **scales,
            )

        return [lambda table=table: call(table) for table in self.pool.tables(lens)]

    def decode(self, case: Decode) -> float:
        q = case.query()[0].flatten(0, 1)
        return min(time_graph(self._calls(q, case.lens, case.q_len, splits)) for splits in (0, 32))

    def prefill(self, case: Prefill) -> float:
        """On contiguous keys: FA3 is slower over pages of 64, and has no prefix to find here."""
        if case.prefix:
            raise ValueError(f"prefix must be 0, got {case.prefix}")
        head_dim = self.pool.k.shape[3]
        cu = torch.tensor([0, case.new], dtype=torch.int32, device="cuda")
        scales = {}
        if self.pool.k.dtype == FP8:
            ones = torch.ones(1, self.pool.kv_heads, device="cuda")
            scales = {"q_descale": ones, "k_descale": ones, "v_descale": ones}
        calls = []
        for _ in range(2):
            q, k, v = (
                torch.randn(case.new, heads, head_dim, device="cuda", dtype=BF16).to(self.pool.k.dtype)
                for heads in (case.heads, self.pool.kv_heads, self.pool.kv_heads)
            )
            calls.append(
                lambda q=q, k=k, v=v: self.api.flash_attn_varlen_func(
                    q,
                    k,
                    v,
                    max_seqlen_q=case.new,
                    cu_seqlens_q=cu,
                    max_seqlen_k=case.new,
                    cu_seqlens_k=cu,
                    causal=True,
                    fa_version=3,
                    **scales,
                )
            )
        return time_graph(calls, replays=7)


def cudnn_prefill(case: Prefill) -> float:
    """cuDNN's causal attention on contiguous bf16 keys, no pages, no prefix."""
    if case.prefix:
        raise ValueError(f"prefix must be 0, got {case.prefix}")
    head_dim = case.pool.k.shape[3]
    calls = []
    for _ in range(2):
        q, k, v = (
            torch.randn(1, heads, case.new, head_dim, device="cuda", dtype=BF16)
            for heads in (case.heads, case.pool.kv_heads, case.pool.kv_heads)
        )
        calls.append(
            lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=case.heads != case.pool.kv_heads
            )
        )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return time_graph(calls, replays=7)
