"""One pre-norm decoder layer: x += attention(norm(x)); x += ffn(norm(x))."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from katydid_engine.forward_batch import ForwardBatch
from katydid_engine.layers.activations import Activations, Fp8Input
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

    @property
    def input(self) -> Fp8Input | None:
        """What the block wants of rows that ``of_gathered`` gets; it takes plain ones, too."""
        ...

    def told_of(self, own: Tensor) -> Tensor | None:
        """What all ranks must be told of the normed rows that this one keeps, int32 ``[rows, n]``; if anything."""
        ...

    def of_gathered(self, rows: Activations, told: Tensor | None) -> Tensor:
        """Of normed rows.

        Args:
            rows: of all tokens.
            told: what all ranks have told, of all tokens.
        """
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

    def steps(
        self,
        x: BlockOutput,
        residual: Tensor | None,
        table: Tensor,
        batch: ForwardBatch,
        k_pages: Tensor,
        v_pages: Tensor,
        exchange: Exchange | None = None,
    ) -> Steps[tuple[BlockOutput, Tensor]]:
        """Returns ``(output of the feed-forward, residual)``, whose sum is the layer's output.

        Args:
            x: output of the block before, ``[rows, hidden]`` (rows: T, or this rank's share with sequence parallelism).
            residual: None where ``x`` is the whole residual: at the beginning.
            exchange: of a part of a batch that is computed in turns with another.
        """
        exchange, tokens = exchange or self._exchange, batch.num_tokens
        if residual is None:
            assert isinstance(x, Tensor)
            rows, residual = exchange.enter_for(self._attention.input, self._input_norm(x), tokens), x
        else:
            wanted = self._attention.input
            entered, residual = yield from exchange.pass_on(self._input_norm, wanted, x, residual, tokens)
            rows = entered.rows
        attended = self._attention(rows, table, batch, k_pages, v_pages, exchange.make_way)
        block = self.feed_forward
        if isinstance(block, DispatchedMoe):
            kept = exchange.num_kept(tokens)
            return (yield from block.steps(self._post_norm, exchange.leave_in_parts(attended), residual, kept))
        if exchange.splits(tokens):
            entered, residual = yield from exchange.pass_on(
                self._post_norm, block.input, exchange.leave_open(attended), residual, tokens, block.told_of
            )
            out = block.of_gathered(entered.rows, entered.told)
        else:
            out, residual = block.after_norm(self._post_norm, exchange.leave_in_parts(attended), residual)
        return exchange.leave_open([out]), residual

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that launch the same kernels, as far as is known here."""
        wanted = self._attention.input
        rows = None if wanted is None else (wanted.scale is None, wanted.group)
        return type(self.feed_forward), self._attention.sparse, rows

    def attend_sparsely(self) -> None:
        """From now on prompts that a batch plans sparsely are computed so in this layer."""
        self._attention.sparse = True

    def take_part(self) -> Steps[None]:
        """What this layer owes the other ranks in a step in which this one has no tokens."""
        if isinstance(self.feed_forward, DispatchedMoe):
            yield from self.feed_forward.take_part()
