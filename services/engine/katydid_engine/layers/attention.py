"""Grouped-query attention over paged KV: QKV product, one pass that norms, rotates and stores, attention, output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypedDict

import torch
from katydid_kernels import (
    QkNorm,
    block_sparse_prefill,
    decode_attention,
    prefill_attention,
    qkv_post,
    qkv_post_fp8,
    stem_select,
)
from katydid_kernels.gemm.dense import runs_gluon
from katydid_kernels.linear_few import FEW_ROWS
from katydid_runtime.errors import ModelFolderError
from torch import Tensor

from katydid_engine.forward_batch import ForwardBatch
from katydid_engine.layers.activations import Activations, Fp8Input, QuantizedRows
from katydid_engine.layers.linear import ColumnLinear, RowLinear
from katydid_engine.model_config import ModelConfig
from katydid_engine.weights import Weights

__all__ = ["Attention"]


class _Norms(TypedDict):
    q_norm_weight: Tensor | None
    k_norm_weight: Tensor | None
    qk_norm: QkNorm
    eps: float
    hadamard: bool


class _Scales(TypedDict):
    scale: float
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


class Attention:
    """This rank's heads; the result is its summand of the output projection.

    Args:
        kv_dtype: of the pages. e4m3 pages hold K and V over the checkpoint's constant scales, or over 1, K without the
            vector of its head where the checkpoint has means of keys, and q is then quantised too, with a scale for
            each token and head.
        output_parts: of the hidden columns that the result comes in.

    Attributes:
        sparse: whether prompts that a batch plans sparsely are computed so here.
    """

    def __init__(self, weights: Weights, config: ModelConfig, kv_dtype: torch.dtype, *, output_parts: int = 1) -> None:
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self._qkv = ColumnLinear(
            weights,
            [("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)],
            config.hidden_size,
            bias=config.attention_bias,
            # With more ranks than KV heads several ranks hold the same one.
            copies={name: max(1, weights.size // config.num_kv_heads) for name in ("k_proj", "v_proj")},
        )
        self._output = RowLinear(
            weights.scope("o_proj"), q_size, config.hidden_size, bias=config.attention_bias, parts=output_parts
        )
        self._q_norm = weights.tensor("q_norm.weight", (config.head_dim,)) if config.qk_norm else None
        self._k_norm = weights.tensor("k_norm.weight", (config.head_dim,)) if config.qk_norm else None
        scales = [_page_scale(weights, name, config.num_kv_heads) for name in ("k", "v")]
        quantised = kv_dtype.itemsize == 1
        self._k_scale, self._v_scale = (scale if quantised else None for scale in scales)
        mean = _key_mean(weights, config) if config.quantization.key_means else None
        self._k_mean = mean if quantised else None
        self.sparse = False
        self.input = self._qkv.input
        self._dtype = weights.dtype
        self._overlap = runs_gluon(weights.device)
        self._eps = config.rms_norm_eps
        self._rotated_keys = config.quantization.rotated_keys
        self._scale = config.head_dim**-0.5
        # A token's heads are in one CTA's hands then, which quantises them for the output product; of the fewest rows
        # that product does so on its way, at less cost.
        heads = config.num_heads // weights.size
        self._quantises = (
            self._overlap
            and max(1, config.num_kv_heads // weights.size) == 1
            and heads & (heads - 1) == 0
            and self._output.input == Fp8Input()
        )

    def __call__(
        self,
        x: Activations,
        table: Tensor,
        batch: ForwardBatch,
        k_pages: Tensor,
        v_pages: Tensor,
        make_way: Callable[[], None] = lambda: None,
    ) -> Iterator[Tensor]:
        """``[T, hidden] -> [T, hidden]``, in parts of its columns; stores the tokens' K and V first.

        Args:
            table: the model's rotary table.
            k_pages, v_pages: this layer's pages.
            make_way: called in front of a kernel that holds every multiprocessor for long.
        """
        operands = (self._qkv(x), table, batch.positions, batch.slot_mapping, k_pages, v_pages)
        norms: _Norms = {
            "q_norm_weight": self._q_norm,
            "k_norm_weight": self._k_norm,
            "qk_norm": "none" if self._q_norm is None else "before_rope",
            "eps": self._eps,
            "hadamard": self._rotated_keys,
        }
        # What a step is made of is older than the product before: it was there before the layer's first kernel.
        if self._k_scale is None:
            q, q_scale = qkv_post(*operands, **norms, overlap=self._overlap), None
        else:
            q, q_scale = qkv_post_fp8(
                *operands,
                **norms,
                k_scale=self._k_scale,
                v_scale=self._v_scale,
                k_mean=self._k_mean,
                overlap=self._overlap,
            )
        if self._quantises and batch.num_decodes == batch.num_seqs and len(q) > FEW_ROWS:
            out = torch.empty_like(q, dtype=torch.float8_e4m3fn)
            out_scale = torch.empty(len(q), dtype=torch.float32, device=q.device)
            self._decode(q, q_scale, batch, k_pages, v_pages, out, out_scale)
            return self._output.in_parts(QuantizedRows(out.flatten(1), out_scale))
        if batch.num_decodes < batch.num_seqs:
            make_way()
        return self._output.in_parts(self._attend(q, q_scale, batch, k_pages, v_pages).flatten(1))

    def _decode(
        self,
        q: Tensor,
        q_scale: Tensor | None,
        batch: ForwardBatch,
        k_pages: Tensor,
        v_pages: Tensor,
        out: Tensor,
        out_scale: Tensor | None = None,
    ) -> None:
        """Writes the decodes' part of ``out``, of whose rows e4m3 has a scale each."""
        tokens, plan = batch.num_decode_tokens, batch.attention
        assert plan is not None
        shape = (len(plan.decode_lens), plan.decode_q_len, *q.shape[1:])
        decode_attention(
            q[:tokens].view(shape),
            k_pages,
            v_pages,
            plan.decode_table,
            plan.decode_lens,
            scale=self._scale,
            q_scale=None if q_scale is None else q_scale[:tokens].view(shape[:3]),
            k_scale=self._k_scale,
            v_scale=self._v_scale,
            plan=plan.decode,
            scratch=plan.scratch,
            overlap=self._overlap and plan.decode is not None,
            out=out[:tokens].view(shape),
            out_scale=None if out_scale is None else out_scale.view(shape[:2]),
        )

    def _attend(
        self, q: Tensor, q_scale: Tensor | None, batch: ForwardBatch, k_pages: Tensor, v_pages: Tensor
    ) -> Tensor:
        """Decodes and prefill chunks take the kernel made for each; ``[T, heads, head_dim]`` both ways."""
        split, split_tokens, plan = batch.num_decodes, batch.num_decode_tokens, batch.attention
        assert plan is not None
        out = torch.empty_like(q, dtype=self._dtype)
        if split:
            self._decode(q, q_scale, batch, k_pages, v_pages, out)
        chunks = (q[split_tokens:], k_pages, v_pages, batch.block_table[split:], batch.context_lens[split:])
        scales: _Scales = {
            "scale": self._scale,
            "q_scale": None if q_scale is None else q_scale[split_tokens:],
            "k_scale": self._k_scale,
            "v_scale": self._v_scale,
        }
        if split < batch.num_seqs and plan.sparse is not None and self.sparse:
            blocks = stem_select(*chunks, plan.sparse, **scales, overlap=True)
            block_sparse_prefill(*chunks, plan.sparse, blocks, **scales, out=out[split_tokens:])
        elif plan.whole is not None:
            block_sparse_prefill(*chunks, *plan.whole, **scales, out=out[split_tokens:])
        elif split < batch.num_seqs:
            assert plan.prefill_cu_q_lens is not None
            prefill_attention(*chunks, plan.prefill_cu_q_lens, plan=plan.prefill, **scales, out=out[split_tokens:])
        return out


def _page_scale(weights: Weights, name: str, kv_heads: int) -> Tensor:
    """fp32 ``[1]``, or ``[kv_heads / tp]`` where each head has its own; 1 where the checkpoint has none.

    Read whatever the pages' dtype, so that no tensor of the checkpoint stays unread.
    """
    spellings = (f"{name}_scale", f"{name}_cache.scale", f"{name}_proj.{name}_scale", f"{name}_proj.output_scale")
    scale = weights.numbers(*spellings)
    if scale is None:
        return torch.ones(1, device=weights.device)
    if scale.numel() not in (1, kv_heads):
        raise ModelFolderError(
            f"tensor {weights.prefix}{name}_scale has {scale.numel()} numbers, expected 1 or {kv_heads}",
            field=f"{weights.prefix}{name}_scale",
            value=scale.numel(),
            allowed=f"1 or {kv_heads}",
        )
    return scale if scale.numel() == 1 else _of_rank(weights, scale)


def _key_mean(weights: Weights, config: ModelConfig) -> Tensor:
    """fp32 ``[kv_heads / tp, head_dim]``. Read whatever the pages' dtype, as their scales are."""
    shape = (config.num_kv_heads, config.head_dim)
    return _of_rank(weights, weights.tensor("k_mean", shape, dtype=torch.float32))


def _of_rank(weights: Weights, by_head: Tensor) -> Tensor:
    """This rank's KV heads of ``[kv_heads, ...]``; with more ranks than heads several hold the same one."""
    parts = min(weights.size, len(by_head))
    return by_head.chunk(parts)[weights.rank * parts // weights.size].contiguous()
