"""The sparse feed-forward block that a plan asks for, the same in every architecture that has experts."""

from __future__ import annotations

from katydid_engine.layers.dispatched_moe import DispatchedMoe
from katydid_engine.layers.moe import SparseMoe
from katydid_engine.layers.routing import MoeNames
from katydid_engine.models.rank_context import RankContext
from katydid_engine.weights import Weights

__all__ = ["sparse_feed_forward"]


def sparse_feed_forward(context: RankContext, weights: Weights, names: MoeNames) -> SparseMoe | DispatchedMoe:
    """Of the layer whose scope ``weights`` are."""
    config, plan = context.config, context.plan
    assert config.moe is not None
    gain = weights.tensor("post_attention_layernorm.weight", (config.hidden_size,))
    share = context.expert_share(config.moe.num_experts)
    scope = weights.scope("mlp")
    if not context.dispatches:
        return SparseMoe(scope, config.moe, config.hidden_size, names, gain, share)
    return DispatchedMoe(
        scope,
        config.moe,
        config.hidden_size,
        names,
        gain,
        share,
        copies=plan.redundant_experts,
        fp8=plan.fp8_transfers,
        to_all=context.rows_to_all,
    )
