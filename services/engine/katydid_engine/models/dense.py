"""Dense decoders: SwiGLU layers and grouped-query attention, as in Llama 3, SmolLM2 and Qwen3.

What tells these apart is in the config alone: Qwen3 adds a per-head RMSNorm of q and k before RoPE, which
``ModelConfig.qk_norm`` switches on.
"""

from __future__ import annotations

from katydid_engine.layers.decoder import FeedForward
from katydid_engine.layers.mlp import DenseMlp
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.models.rank_context import RankContext
from katydid_engine.weights import Weights

__all__ = ["build_dense", "dense_feed_forward"]


def build_dense(context: RankContext, weights: Weights) -> DecoderLM:
    """Reads every tensor of this rank's share."""
    return DecoderLM(context, weights, dense_feed_forward)


def dense_feed_forward(context: RankContext, weights: Weights, index: int) -> FeedForward:  # noqa: ARG001
    """The same dense block in every layer."""
    config = context.config
    return DenseMlp(weights.scope("mlp"), config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
