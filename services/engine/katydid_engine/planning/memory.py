"""What a rank of a plan holds: weights, and how many tokens' pages fit beside them. fp8 weights and pages."""

from __future__ import annotations

from dataclasses import dataclass

from katydid_runtime.errors import SettingsError

from katydid_engine.model_config import ModelConfig
from katydid_engine.parallel import ParallelPlan

__all__ = ["RankMemory", "check_memory", "rank_memory"]

# Bytes of a weight that is never quantised; memory beside weights and pages; and what all of it may fill of a GPU.
_PLAIN = 2
_GRAPHS_AND_SCRATCH = 6 << 30
_FILLED = 0.92


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank, the fullest of the plan.

    Attributes:
        shared_weights: attention, dense layers, shared experts, embedding and head: what every token reads.
        expert_weights: routed experts, copies included.
        page_bytes_per_token: KV pages of one token of one of this rank's requests.
        tokens: KV tokens that fit into what is left of its memory; at most 0 when the weights alone do not fit.
    """

    shared_weights: int
    expert_weights: int
    page_bytes_per_token: int
    tokens: int

    @property
    def weights(self) -> int:
        return self.shared_weights + self.expert_weights

    def group_requests(self, context: int) -> int:
        """How many requests of ``context`` tokens a DP group holds."""
        return max(0, self.tokens) // context


def check_memory(config: ModelConfig, plan: ParallelPlan, *, free_bytes: int, weight_bytes: float) -> None:
    """Before anything is loaded.

    Args:
        free_bytes: of this rank's GPU.
        weight_bytes: a weight of a linear or an expert.

    Raises:
        SettingsError: the weights alone do not fit.
    """
    needed = rank_memory(config, plan, memory_bytes=free_bytes, weight_bytes=weight_bytes).weights
    if needed > free_bytes:
        raise SettingsError(
            f"plan {plan}: a rank's weights take {needed / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB of its GPU are free",
            field="plan",
            value=str(plan),
            allowed="a plan over more ranks, or weights quantised further",
        )


def rank_memory(config: ModelConfig, plan: ParallelPlan, *, memory_bytes: int, weight_bytes: float = 1.0) -> RankMemory:
    """Of the fullest rank.

    Args:
        memory_bytes: of a GPU.
        weight_bytes: a weight of a linear or an expert; by default fp8's.
    """
    hidden, layers = config.hidden_size, -(-config.num_layers // plan.pp)
    q, kv = config.num_heads * config.head_dim, plan.kv_heads(config.num_kv_heads) * config.head_dim
    attention = hidden * (2 * q // plan.tp + 2 * kv)
    sparse = sum(config.sparse_layers) if config.moe is not None else 0
    dense = 3 * hidden * config.intermediate_size // plan.tp
    shared, experts = attention * layers, 0
    if config.moe is not None:
        of_shared = 3 * hidden * config.moe.shared_intermediate_size
        per_expert = 3 * hidden * config.moe.intermediate_size
        sparse_here = min(layers, -(-sparse // plan.pp))
        shared += sparse_here * (of_shared if plan.dispatches else of_shared // plan.tp)
        shared += (layers - sparse_here) * dense
        held = config.moe.num_experts + plan.redundant_experts
        experts = sparse_here * (held // plan.ep * per_expert if plan.ep > 1 else held * per_expert // plan.tp)
    else:
        shared += layers * dense
    shared, experts = int(shared * weight_bytes), int(experts * weight_bytes)
    shared += (1 if config.tie_embeddings else 2) * config.vocab_size * hidden * _PLAIN // plan.tp
    page = 2 * kv * layers
    left = int(memory_bytes * _FILLED) - shared - experts - _GRAPHS_AND_SCRATCH
    return RankMemory(shared, experts, page, left // page)
