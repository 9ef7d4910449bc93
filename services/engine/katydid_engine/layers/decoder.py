"""One pre-norm decoder layer: x += attention(norm(x)); x += ffn(norm(x))."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from katydid_engine.forward_batch import ForwardBatch
from katydid_engine.layers.attention import Attention
from katydid_engine.layers.exchange import Exchange
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.model_config import ModelConfig
from katydid_engine.weights import Weights

__all__ = ["DecoderLayer"]


class DecoderLayer:
    """Additions are deferred into the next norm, so a layer passes on a block's output and the residual apart."""

    def __init__(
        self, weights: Weights, config: ModelConfig, exchange: Exchange, feed_forward: Callable[[Tensor], Tensor]
    ) -> None:
        self._input_norm = RmsNorm(weights.scope("input_layernorm"), config.hidden_size, config.rms_norm_eps)
        self._attention = Attention(weights.scope("self_attn"), config)
        self._post_norm = RmsNorm(weights.scope("post_attention_layernorm"), config.hidden_size, config.rms_norm_eps)
        self._feed_forward = feed_forward
        self._exchange = exchange

    def __call__(
        self, x: Tensor, residual: Tensor | None, table: Tensor, batch: ForwardBatch, k_pages: Tensor, v_pages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns ``(output of the feed-forward, residual)``, whose sum is the layer's output.

        Args:
            x: output of the block before, ``[rows, hidden]`` (rows: T, or this rank's share with sequence parallelism).
            residual: None in the first layer, where ``x`` is the embedding.
        """
        if residual is None:
            normed, residual = self._input_norm(x), x
        else:
            normed, residual = self._input_norm.add(x, residual)
        gathered = self._exchange.enter(normed, batch.num_tokens)
        attended = self._exchange.leave(self._attention(gathered, table, batch, k_pages, v_pages))
        normed, residual = self._post_norm.add(attended, residual)
        gathered = self._exchange.enter(normed, batch.num_tokens)
        return self._exchange.leave(self._feed_forward(gathered)), residual
