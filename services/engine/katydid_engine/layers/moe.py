"""The sparse feed-forward block: a router, routed experts, and perhaps a shared expert that every token passes.

Here every rank of the TP group has all rows. Experts are cut over the group by id (expert parallel) or by column like a
dense block; either way a rank's result is its summand, and the shared expert is cut by column. Where each rank has rows
of its own, ``dispatched_moe`` sends them to their experts instead.
"""

from __future__ import annotations

from torch import Tensor

from katydid_engine.layers.activations import Activations
from katydid_engine.layers.expert_loading import load_experts
from katydid_engine.layers.expert_share import ExpertShare
from katydid_engine.layers.mlp import DenseMlp
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.layers.routing import MoeNames, Routed, Routing
from katydid_engine.matrices import has_matrix
from katydid_engine.model_config import MoeConfig
from katydid_engine.weights import Weights

__all__ = ["SparseMoe", "shared_expert"]


class SparseMoe:
    """Router replicated, experts and shared expert cut.

    Args:
        gain: ``[hidden]``, the weight of the norm before the block.
        share: what this rank holds of the experts.
    """

    def __init__(
        self, weights: Weights, moe: MoeConfig, hidden_size: int, names: MoeNames, gain: Tensor, share: ExpertShare
    ) -> None:
        self._routing = Routing(weights, moe, hidden_size, names)
        self._experts = load_experts(weights, moe, hidden_size, gain, share)
        self._shared = shared_expert(weights, moe, hidden_size, names)

    def __call__(self, x: Activations) -> Tensor:
        """``[T, hidden] -> [T, hidden]``."""
        assert isinstance(x, Tensor)
        return self._run(self._routing.of(x, self._experts.input))

    def after_norm(self, norm: RmsNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        routed, total = self._routing.after_norm(norm, x, residual, self._experts.input)
        return self._run(routed), total

    def _run(self, routed: Routed) -> Tensor:
        shared = None
        if self._shared is not None:
            # They serve both, unless each has a constant scale of its own.
            same = self._shared.input == self._experts.input and self._has_no_constant_scale
            shared = self._shared(routed.rows if same else routed.x)
        return self._experts(routed.rows, routed.weights, routed.ids, shared)

    @property
    def _has_no_constant_scale(self) -> bool:
        return self._experts.input is None or self._experts.input.scale is None


def shared_expert(weights: Weights, moe: MoeConfig, hidden_size: int, names: MoeNames) -> DenseMlp | None:
    """This rank's columns of it; None where the model has none."""
    if not moe.shared_intermediate_size:
        return None
    present = [name for name in names.shared if has_matrix(weights.scope(f"{name}.gate_proj"))]
    scope = weights.scope((present or names.shared)[0])
    return DenseMlp(scope, hidden_size, moe.shared_intermediate_size)
