"""Qwen3 (dense): Llama with a per-head RMSNorm of q and k before RoPE, which ``ModelConfig.qk_norm`` switches on."""

from __future__ import annotations

from katydid_engine.models.decoder_lm import DecoderLM, RankContext
from katydid_engine.models.llama import dense_feed_forward
from katydid_engine.weights import Weights

__all__ = ["build_qwen3"]


def build_qwen3(context: RankContext, weights: Weights) -> DecoderLM:
    """Reads every tensor of this rank's share."""
    return DecoderLM(context, weights, dense_feed_forward)
