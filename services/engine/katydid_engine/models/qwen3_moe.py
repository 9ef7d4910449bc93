"""Qwen3-MoE: Qwen3 attention, softmax-routed experts without a shared one, dense where the config says so."""

from __future__ import annotations

from katydid_engine.layers.decoder import FeedForward
from katydid_engine.layers.dispatched_moe import DispatchedMoe
from katydid_engine.layers.routing import MoeNames
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.models.dense import dense_feed_forward
from katydid_engine.models.rank_context import RankContext
from katydid_engine.models.sparse import sparse_feed_forward
from katydid_engine.weights import Weights

__all__ = ["build_qwen3_moe"]

_NAMES = MoeNames(router="gate.weight")


def build_qwen3_moe(context: RankContext, weights: Weights) -> DecoderLM:
    """Reads every tensor of this rank's share."""
    return DecoderLM(context, weights, _feed_forward)


def _feed_forward(context: RankContext, weights: Weights, index: int) -> FeedForward | DispatchedMoe:
    config = context.config
    if config.moe is None or not config.sparse_layers[index]:
        return dense_feed_forward(context, weights, index)
    return sparse_feed_forward(context, weights, _NAMES)
