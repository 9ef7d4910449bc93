"""Other attention kernels on the same batches: FA3 as vLLM ships it, FlashInfer, and cuDNN through torch.

They want tokens first in both pages, `[pages, 64, kv_heads, head_dim]`: a peer pool is a rearranged copy of ours.
Times are microseconds a call, like ours; None where a peer has no kernel for the case.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from attention_cases import BF16, FP8, Decode, Pool, Prefill, time_graph
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

PREFILL_REPLAYS = 7


class PeerPool:
    """The pages of one of our pools in the peers' layout."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        pages, heads, tokens, head_dim = pool.k.shape
        self.k, self.v = pool.k.new_empty(2, pages, tokens, heads, head_dim)
        self.k.copy_(pool.k.transpose(1, 2))
        self.v.copy_(pool.v.permute(0, 3, 1, 2))


class Peer(Protocol):
    name: str

    def decode(self, pages: PeerPool, case: Decode, /) -> float | None: ...

    def prefill(self, case: Prefill, /) -> float | None: ...


def peers() -> list[Peer]:
    """Those whose packages are on the path; torch's cuDNN always is."""
    found: list[Peer] = [Cudnn()]
    if importlib.util.find_spec("vllm") is not None:
        found.append(Fa3())
    if importlib.util.find_spec("flashinfer") is not None:
        found.append(FlashInfer())
    return found


def dense_inputs(case: Prefill) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Two sets of contiguous queries, keys and values: the peers are slower over pages of 64."""
    if case.prefix:
        raise ValueError(f"prefix must be 0, got {case.prefix}")
    head_dim, dtype = case.pool.k.shape[3], case.pool.k.dtype

    def rand(heads: int) -> Tensor:
        return torch.randn(case.new, heads, head_dim, device="cuda", dtype=BF16).to(dtype)

    return [(rand(case.heads), rand(case.pool.kv_heads), rand(case.pool.kv_heads)) for _ in range(2)]


class Fa3:
    """FA3 with its scheduler metadata made ahead, as vLLM runs it; best of its own split choice and 32 splits."""

    name = "FA3"

    def __init__(self) -> None:
        self.api = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")

    def _calls(self, pages: PeerPool, case: Decode, splits: int) -> list[Callable[[], object]]:
        q, rows, kv_heads = case.query()[0].flatten(0, 1), len(case.lens), pages.pool.kv_heads
        used = torch.tensor(case.lens, dtype=torch.int32, device="cuda")
        cu = torch.arange(0, rows * case.q_len + 1, case.q_len, dtype=torch.int32, device="cuda")
        metadata = self.api.get_scheduler_metadata(
            batch_size=rows,
            max_seqlen_q=case.q_len,
            max_seqlen_k=max(case.lens),
            num_heads_q=case.heads,
            num_heads_kv=kv_heads,
            headdim=q.shape[2],
            cache_seqlens=used,
            qkv_dtype=q.dtype,
            cu_seqlens_q=cu,
            page_size=64,
            causal=True,
            num_splits=splits,
        )
        out = torch.empty_like(q, dtype=BF16)
        fixed: dict[str, Any] = {"max_seqlen_q": case.q_len, "cu_seqlens_q": cu, "seqused_k": used}
        fixed |= {"max_seqlen_k": max(case.lens)}
        fixed |= {"causal": True, "out": out, "scheduler_metadata": metadata, "num_splits": splits, "fa_version": 3}
        fixed |= self._scales(q.dtype, rows, kv_heads)
        return [
            partial(self.api.flash_attn_varlen_func, q, pages.k, pages.v, block_table=table, **fixed)
            for table in pages.pool.tables(case.lens)
        ]

    @staticmethod
    def _scales(dtype: torch.dtype, rows: int, kv_heads: int) -> dict[str, Tensor]:
        if dtype != FP8:
            return {}
        return dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.ones(rows, kv_heads, device="cuda"))

    def decode(self, pages: PeerPool, case: Decode) -> float:
        return min(time_graph(self._calls(pages, case, splits)) for splits in (0, 32))

    def prefill(self, case: Prefill) -> float:
        cu = torch.tensor([0, case.new], dtype=torch.int32, device="cuda")
        fixed: dict[str, Any] = {"max_seqlen_q": case.new, "max_seqlen_k": case.new}
        fixed |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        fixed |= {"causal": True, "fa_version": 3, **self._scales(case.pool.k.dtype, 1, case.pool.kv_heads)}
        calls = [partial(self.api.flash_attn_varlen_func, *qkv, **fixed) for qkv in dense_inputs(case)]
        return time_graph(calls, replays=PREFILL_REPLAYS, at_least=2)


class FlashInfer:
    """FlashInfer planned ahead: decode on the tensor cores (bf16 queries over fp8 pages), prefill by its Hopper
    kernels."""

    name = "FlashInfer"

    def __init__(self) -> None:
        self.api: Any = importlib.import_module("flashinfer")
        self.workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def decode(self, pages: PeerPool, case: Decode) -> float | None:
        if case.q_len > 1:
            return None
        q = case.query()[0].flatten(0, 1).to(BF16)
        counts = torch.tensor([-(-n // 64) for n in case.lens], dtype=torch.int32)
        indptr = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
        inside = (torch.arange(int(counts.max()))[None] < counts[:, None]).cuda()
        last = torch.tensor([(n - 1) % 64 + 1 for n in case.lens], dtype=torch.int32)
        out = torch.empty_like(q)
        calls = []
        for table in pages.pool.tables(case.lens):
            wrapper = self.api.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(
                indptr,
                table[inside],
                last,
                case.heads,
                pages.pool.kv_heads,
                q.shape[2],
                64,
                q_data_type=BF16,
                kv_data_type=pages.k.dtype,
            )
            calls.append(partial(wrapper.run, q, (pages.k, pages.v), out=out))
        return time_graph(calls)

    def prefill(self, case: Prefill) -> float:
        cu = torch.tensor([0, case.new], dtype=torch.int32, device="cuda")
        calls = []
        for q, k, v in dense_inputs(case):
            wrapper = self.api.BatchPrefillWithRaggedKVCacheWrapper(self.workspace, "NHD", backend="fa3")
            wrapper.plan(
                cu,
                cu,
                case.heads,
                case.pool.kv_heads,
                q.shape[2],
                causal=True,
                q_data_type=q.dtype,
                kv_data_type=k.dtype,
                o_data_type=BF16,
            )
            inputs = (q, k, v, *(torch.ones(x.shape[1], device="cuda") for x in (q, k, v) if q.dtype == FP8))
            calls.append(partial(wrapper.run, *inputs, out=torch.empty_like(q, dtype=BF16)))
        return time_graph(calls, replays=PREFILL_REPLAYS, at_least=2)


class Cudnn:
    """cuDNN's causal attention on contiguous bf16 keys: no pages, no prefix."""

    name = "cuDNN"

    def decode(self, _pages: PeerPool, _case: Decode) -> None:
        return None

    def prefill(self, case: Prefill) -> float | None:
        if case.pool.k.dtype != BF16:
            return None
        calls = []
        for qkv in dense_inputs(case):
            q, k, v = (x.transpose(0, 1)[None].contiguous() for x in qkv)
            attend = torch.nn.functional.scaled_dot_product_attention
            calls.append(partial(attend, q, k, v, is_causal=True, enable_gqa=case.heads != case.pool.kv_heads))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return time_graph(calls, replays=PREFILL_REPLAYS, at_least=2)
