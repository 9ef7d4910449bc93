"""Hy3: Qwen3-style attention, a dense first layer, then sigmoid-routed experts beside a shared one, and draft layers.

A multi-token-prediction (MTP) layer stands after the decoder layers in the checkpoint. From the target's hidden state
at position p and the token at p + 1 it predicts the token at p + 2:

    h' = eh_proj([enorm(embed(token)), hnorm(hidden)])    hidden is taken *after* the target's final norm
    h' -> one decoder layer with its own experts and pages -> final_layernorm -> the target's head
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from katydid_engine.forward_batch import ForwardBatch
from katydid_engine.kv_cache import KvCache
from katydid_engine.layers.decoder import DecoderLayer, FeedForward
from katydid_engine.layers.dispatched_moe import DispatchedMoe
from katydid_engine.layers.exchange import Exchange
from katydid_engine.layers.linear import RowLinear
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.layers.routing import MoeNames
from katydid_engine.layers.steps import Steps, finish
from katydid_engine.matrices import has_matrix
from katydid_engine.model_config import ModelConfig
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.models.dense import dense_feed_forward
from katydid_engine.models.rank_context import RankContext
from katydid_engine.models.sparse import sparse_feed_forward
from katydid_engine.weights import Weights

__all__ = ["HyV3", "MtpLayer", "build_hy_v3", "count_mtp_layers"]

# The released checkpoints' names first, then those of transformers' own modules.
_NAMES = MoeNames(
    router=("router.gate.weight", "gate.weight"),
    selection_bias=("expert_bias", "e_score_correction_bias"),
    shared=("shared_mlp", "shared_experts"),
)


def build_hy_v3(context: RankContext, weights: Weights) -> HyV3:
    """Reads every tensor of this rank's share, draft layers included."""
    return HyV3(context, weights)


def count_mtp_layers(weights: Weights, num_layers: int) -> int:
    """Draft layers in a checkpoint: those appended after the decoder layers, whether or not the config counts them."""
    count = 0
    while has_matrix(weights.scope(f"model.layers.{num_layers + count}.eh_proj")):
        count += 1
    return count


class HyV3(DecoderLM):
    """The target model and its draft layers; ``config.num_mtp_layers`` may be 0."""

    def __init__(self, context: RankContext, weights: Weights) -> None:
        super().__init__(context, weights, _feed_forward)
        first = self.config.num_layers
        self._mtp_layers = [
            self._mtp_layer(weights.scope(f"model.layers.{first + depth}"), first + depth)
            for depth in range(self.config.num_mtp_layers if context.stage.first else 0)
        ]

    @torch.inference_mode()
    def draft(
        self, batch: ForwardBatch, hidden: Tensor, next_token_ids: Tensor, kv_cache: KvCache, *, depth: int = 0
    ) -> Tensor:
        """Runs one draft layer over the batch's positions, writing its pages.

        Args:
            batch: the batch ``forward`` ran; positions are those of ``hidden``.
            hidden: ``[T, hidden]``: what ``forward`` returned, or a previous ``draft`` when drafting further.
            next_token_ids: int32 ``[T]``, the token that follows each position.
            kv_cache: pages; the draft layers' come last.
            depth: which draft layer.

        Returns:
            ``[T, hidden]`` after the draft layer's norm: ``logits`` of it predict the token after ``next_token_ids``.
        """
        self._agree(1 + depth, batch)
        batch = self._planner.planned(batch)
        pages = len(self._layers) + depth
        k_pages, v_pages = kv_cache.layer(pages)
        # The first position has no predecessor whose draft it could be; the model was trained with it blanked.
        embedded = self._embedded(next_token_ids, batch.positions)
        return self._mtp_layers[depth](embedded, hidden, self._table, batch, k_pages, v_pages)

    @torch.inference_mode()
    def take_part(self, kind: int = 0, most: int | None = None, behind: int = 0) -> None:
        if kind == 0:
            super().take_part(0, most)
        else:
            if most is not None:
                self.exchange_rows(most)
            finish(self._mtp_layers[kind - 1].take_part())
        for _ in range(behind):
            finish(self._mtp_layers[0].take_part())

    def _every_layer(self) -> list[DecoderLayer]:
        return [*self._layers, *(layer.block for layer in self._mtp_layers)]

    def _mtp_layer(self, weights: Weights, index: int) -> MtpLayer:
        return MtpLayer(
            weights, self.config, self._exchange, lambda block: self._decoder_layer(block, index, _feed_forward)
        )


class MtpLayer:
    """One draft layer around a decoder layer of its own; embedding, rotary table and head are the target's."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        exchange: Exchange,
        build_decoder_layer: Callable[[Weights], DecoderLayer],
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self._exchange = exchange
        self._embedding_norm = RmsNorm(weights.scope("enorm"), size, eps)
        self._hidden_norm = RmsNorm(weights.scope("hnorm"), size, eps)
        # Every rank has both inputs, so the product is cut by their columns: each rank reads its part of the weight.
        self._merge = RowLinear(weights.scope("eh_proj"), 2 * size, size, bias=False)
        step = 2 * size // weights.size
        self._columns = range(weights.rank * step, (weights.rank + 1) * step)
        # Some exporters nest the decoder layer one level down.
        block = weights.scope("mtp_block") if weights.has("mtp_block.input_layernorm.weight") else weights
        self.block = build_decoder_layer(block)
        self._final_norm = RmsNorm(weights.scope("final_layernorm"), size, eps)

    def __call__(
        self, embedded: Tensor, hidden: Tensor, table: Tensor, batch: ForwardBatch, k_pages: Tensor, v_pages: Tensor
    ) -> Tensor:
        """``embedded`` and ``hidden``: ``[T, hidden]``, of the next tokens and of the positions before them."""
        x = self._exchange.leave(self._merge(self._own_columns(embedded, hidden)))
        out, residual = finish(self.block.steps(x, None, table, batch, k_pages, v_pages))
        return self._exchange.last(self._final_norm, out, residual, batch.num_tokens)

    def take_part(self) -> Steps[None]:
        """What a rank without tokens owes the others."""
        return self.block.take_part()

    def _own_columns(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """This rank's part of ``[enorm(embedded), hnorm(hidden)]``."""
        first, last, size = self._columns.start, self._columns.stop, hidden.shape[1]
        if last <= size:
            return self._embedding_norm(embedded)[:, first:last]
        if first >= size:
            return self._hidden_norm(hidden)[:, first - size : last - size]
        return torch.cat((self._embedding_norm(embedded), self._hidden_norm(hidden)), dim=-1)[:, first:last]


def _feed_forward(context: RankContext, weights: Weights, index: int) -> FeedForward | DispatchedMoe:
    config = context.config
    if config.moe is None or (index < config.num_layers and not config.sparse_layers[index]):
        return dense_feed_forward(context, weights, index)
    return sparse_feed_forward(context, weights, _NAMES)
