"""One pre-norm decoder layer: x += attention(norm(x)); x += ffn(norm(x))."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from katydid_engine.forward_batch import ForwardBatch
from katydid_engine.layers.activations import Activations
from katydid_engine.layers.attention import Attention
from katydid_engine.layers.dispatched_moe import DispatchedMoe
from katydid_engine.layers.exchange import BlockOutput, Exchange
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.layers.steps import Steps
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
        feed_forward: FeedForward | DispatchedMoe,
        kv_dtype: torch.dtype,
    ) -> None:
        self._input_norm = RmsNorm(weights.scope("input_layernorm"), config.hidden_size, config.rms_norm_eps)
        self._attention = Attention(weights.scope("self_attn"), config, kv_dtype, output_parts=exchange.parts)
        self._post_norm = RmsNorm(weights.scope("post_attention_layernorm"), config.hidden_size, config.rms_norm_eps)
        self.feed_forward = feed_forward
        self._exchange = exchange
        self._early_input = self._attention.input if exchange.quantises_first else None

    def steps(
        self,
        x: BlockOutput,
        residual: Tensor | None,
        table: Tensor,
        batch: ForwardBatch,
        k_pages: Tensor,
        v_pages: Tensor,
    ) -> Steps[tuple[BlockOutput, Tensor]]:
        """Returns ``(output of the feed-forward, residual)``, whose sum is the layer's output.

        Args:
            x: output of the block before, ``[rows, hidden]`` (rows: T, or this rank's share with sequence parallelism).
            residual: None in the first layer, where ``x`` is the embedding.
        """
        entered: Activations
        if residual is None:
            assert isinstance(x, Tensor)
            entered, residual = self._input_norm(x), x
        else:
            entered, residual = self._exchange.add_for(self._input_norm, self._early_input, x, residual)
        entered = self._exchange.enter_for(self._attention.input, entered, batch.num_tokens)
        attended = self._exchange.leave_in_parts(self._attention(entered, table, batch, k_pages, v_pages))
        block = self.feed_forward
        if isinstance(block, DispatchedMoe):
            kept = self._exchange.num_kept(batch.num_tokens)
            return (yield from block.steps(self._post_norm, attended, residual, kept))
        if self._exchange.sequence_parallel:
            normed, residual = self._post_norm.add(attended, residual)
            out = block(self._exchange.enter_for(None, normed, batch.num_tokens))
        else:
            out, residual = block.after_norm(self._post_norm, attended, residual)
        return self._exchange.leave_open(out), residual

    def attend_sparsely(self) -> None:
        """From now on prompts that a batch plans sparsely are computed so in this layer."""
        self._attention.sparse = True

    def take_part(self) -> Steps[None]:
        """What this layer owes the other ranks in a step in which this one has no tokens."""
        if isinstance(self.feed_forward, DispatchedMoe):
            yield from self.feed_forward.take_part()
