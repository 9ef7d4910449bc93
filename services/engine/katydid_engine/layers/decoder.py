"""One pre-norm decoder layer: x += attention(norm(x)); x += ffn(norm(x))."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from katydid_engine.forward_batch import ForwardBatch
from katydid_engine.layers.activations import Activations, Fp8Input
from katydid_engine.layers.attention import Attention
from katydid_engine.layers.exchange import Exchange
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.model_config import ModelConfig
from katydid_engine.weights import Weights

__all__ = ["DecoderLayer", "FeedForward"]


class FeedForward(Protocol):
    """This rank's share of a feed-forward block; ``input`` is what it wants of x, None for plain rows."""

    @property
    def input(self) -> Fp8Input | None: ...

    def __call__(self, x: Activations) -> Tensor:
        """``[T, hidden] -> [T, hidden]``, this rank's summand."""
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
        self._feed_forward_input = None if exchange.sequence_parallel else feed_forward.input

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
        entered = self._enter(entered, batch)
        attended = self._exchange.leave(self._attention(entered, table, batch, k_pages, v_pages))
        entered, residual = self._post_norm.add_for(self._feed_forward_input, attended, residual)
        return self._exchange.leave(self._feed_forward(self._enter(entered, batch))), residual

    def _enter(self, x: Activations, batch: ForwardBatch) -> Activations:
        return self._exchange.enter(x, batch.num_tokens) if isinstance(x, Tensor) else x
