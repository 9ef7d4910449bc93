"""One pre-norm decoder layer: x += attention(norm(x)); x += ffn(norm(x))."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from katydid_engine.forward_batch import ForwardBatch
from katydid_engine.layers.activations import Activations
from katydid_engine.layers.attention import Attention
from katydid_engine.layers.exchange import Exchange
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.model_config import ModelConfig
from katydid_engine.weights import Weights

__all__ = ["DecoderLayer", "FeedForward"]


class FeedForward(Protocol):
    """This rank's share of a feed-forward block; what it returns first is its summand ``[T, hidden]``."""

    def __call__(self, x: Activations) -> Tensor:
        """Of normed rows."""
        ...

    def after_norm(self, norm: RmsNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Of ``norm(x + residual)``, and that sum: the block knows what its norm can be fused with."""
        ...


class DecoderLayer:
    """Additions are deferred into the next norm, so a layer passes on a block's output and the residual apart."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        exchange: Exchange,
        feed_forward: FeedForward,
        kv_dtype: torch.dtype,
    ) -> None:
        self._input_norm = RmsNorm(weights.scope("input_layernorm"), config.hidden_size, config.rms_norm_eps)
        self._attention = Attention(weights.scope("self_attn"), config, kv_dtype)
        self._post_norm = RmsNorm(weights.scope("post_attention_layernorm"), config.hidden_size, config.rms_norm_eps)
        self._feed_forward = feed_forward
        self._exchange = exchange
        # Ranks exchange plain rows; who quantises then does so after the exchange.
        self._attention_input = None if exchange.sequence_parallel else self._attention.input

    def __call__(
        self, x: Tensor, residual: Tensor | None, table: Tensor, batch: ForwardBatch, k_pages: Tensor, v_pages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns ``(output of the feed-forward, residual)``, whose sum is the layer's output.

        Args:
            x: output of the block before, ``[rows, hidden]`` (rows: T, or this rank's share with sequence parallelism).
            residual: None in the first layer, where ``x`` is the embedding.
        """
        entered: Activations
        if residual is None:
            entered, residual = self._input_norm(x), x
        else:
            entered, residual = self._input_norm.add_for(self._attention_input, x, residual)
        if isinstance(entered, Tensor):
            entered = self._exchange.enter(entered, batch.num_tokens)
        attended = self._exchange.leave(self._attention(entered, table, batch, k_pages, v_pages))
        if self._exchange.sequence_parallel:
            normed, residual = self._post_norm.add(attended, residual)
            out = self._feed_forward(self._exchange.enter(normed, batch.num_tokens))
        else:
            out, residual = self._feed_forward.after_norm(self._post_norm, attended, residual)
        return self._exchange.leave(out), residual
