"""Llama: dense SwiGLU layers and plain grouped-query attention (SmolLM2 and Llama 3 are of this family)."""

from __future__ import annotations

from katydid_engine.layers.mlp import DenseMlp
from katydid_engine.models.decoder_lm import DecoderLM, FeedForward, RankContext
from katydid_engine.weights import Weights

__all__ = ["build_llama", "dense_feed_forward"]


def build_llama(context: RankContext, weights: Weights) -> DecoderLM:
    """Reads every tensor of this rank's share."""
    return DecoderLM(context, weights, dense_feed_forward)


def dense_feed_forward(context: RankContext, weights: Weights, index: int) -> FeedForward:  # noqa: ARG001
    """The same dense block in every layer."""
    config = context.config
    return DenseMlp(weights, config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
