"""A decoder-only language model on one rank: embedding, layers, final norm, head. What the runner calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from katydid_engine.attention_plan import AttentionPlanner
from katydid_engine.collectives import Collectives
from katydid_engine.forward_batch import ForwardBatch
from katydid_engine.kv_cache import KvCache
from katydid_engine.layers.decoder import DecoderLayer, FeedForward
from katydid_engine.layers.embedding import Embedding, LmHead
from katydid_engine.layers.exchange import Exchange
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.layers.rotary import rotary_table
from katydid_engine.model_config import ModelConfig
from katydid_engine.parallel import ParallelPlan
from katydid_engine.weights import Weights

__all__ = ["DecoderLM", "FeedForward", "FeedForwardBuilder", "RankContext"]

FeedForwardBuilder = Callable[["RankContext", Weights, int], FeedForward]
"""Builds the feed-forward block of layer ``index`` from that layer's scope: where architectures differ."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """What every part of a model on this rank is built with; ``kv_dtype`` is the pages'."""

    config: ModelConfig
    plan: ParallelPlan
    collectives: Collectives
    kv_dtype: torch.dtype

    @property
    def expert_parallel(self) -> bool:
        return self.plan.ep > 1


class DecoderLM:
    """One rank's share of a model.

    Attributes:
        config: of the whole model, not of this rank's share.
        device: of weights, pages and batches.
        dtype: of hidden states.
    """

    def __init__(self, context: RankContext, weights: Weights, feed_forward: FeedForwardBuilder) -> None:
        config = context.config
        self.config = config
        self.device = weights.device
        self.dtype = weights.dtype
        self._context = context
        self._exchange = Exchange(context.collectives, sequence_parallel=context.plan.sp)
        tp = context.plan.tp
        self._planner = AttentionPlanner(
            config.num_heads // tp, config.num_kv_heads // tp, config.head_dim, weights.device
        )
        self._table = rotary_table(config.rope, config.head_dim, config.max_positions, weights.device)
        self._embedding = Embedding(weights.scope("model.embed_tokens"), config.vocab_size, config.hidden_size)
        self._layers = [
            self._decoder_layer(weights.scope(f"model.layers.{index}"), index, feed_forward)
            for index in range(config.num_layers)
        ]
        self._norm = RmsNorm(weights.scope("model.norm"), config.hidden_size, config.rms_norm_eps)
        self._head = LmHead(
            weights.scope("lm_head"),
            context.collectives,
            config.vocab_size,
            config.hidden_size,
            tied=self._embedding if config.tie_embeddings else None,
            fp32=config.lm_head_fp32,
        )

    def new_kv_cache(self, num_pages: int) -> KvCache:
        """Zeroed pages for this rank's KV heads, every layer (an MTP layer's last)."""
        return KvCache.allocate(
            num_layers=self.config.num_layers + self.config.num_mtp_layers,
            num_pages=num_pages,
            num_kv_heads=self.config.num_kv_heads // self._context.plan.tp,
            head_dim=self.config.head_dim,
            dtype=self._context.kv_dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> Tensor:
        """Writes the batch's K and V into its pages and returns hidden states ``[T, hidden]`` after the final norm."""
        batch = self._planner.planned(batch)
        x = self._exchange.leave(self._embedding(batch.token_ids))
        residual: Tensor | None = None
        for index, layer in enumerate(self._layers):
            x, residual = layer(x, residual, self._table, batch, kv_cache.k_pages[index], kv_cache.v_pages[index])
        assert residual is not None
        hidden, _ = self._norm.add(x, residual)
        return self._exchange.enter(hidden, batch.num_tokens)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits ``[rows, vocab]`` of hidden rows ``[rows, hidden]`` (pick the rows that are sampled first)."""
        return self._head(hidden)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Whole embeddings ``[T, hidden]`` of int32 ``[T]``, on every rank."""
        return self._exchange.collectives.all_reduce(self._embedding(token_ids))

    def _decoder_layer(self, weights: Weights, index: int, feed_forward: FeedForwardBuilder) -> DecoderLayer:
        return DecoderLayer(
            weights,
            self.config,
            self._exchange,
            feed_forward(self._context, weights, index),
            self._context.kv_dtype,
        )
