"""The sparse feed-forward block: a router, routed experts, and perhaps a shared expert that every token passes.

Here every rank of the TP group has all rows. Experts are cut over the group by id (expert parallel) or by column like a
dense block; either way a rank's result is its summand, and the shared expert is cut by column. One that is as wide as
the others and cut like them is one of them, to which every token goes: no launch is its own then. Where each rank has
rows of its own, ``dispatched_moe`` sends them to their experts instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_engine.layers.activations import Activations, Fp8Input
from katydid_engine.layers.expert_loading import load_experts
from katydid_engine.layers.expert_share import ExpertShare
from katydid_engine.layers.mlp import DenseMlp
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.layers.routing import MoeNames, Routing
from katydid_engine.matrices import has_matrix, stored_alike
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
        among = _shared_among_others(weights, moe, names, share)
        self._routing = Routing(weights, moe, hidden_size, names, shared=among is not None)
        self._experts = load_experts(weights, moe, hidden_size, gain, share, among)
        self._shared = shared_expert(weights, moe, hidden_size, names) if among is None else None

    @property
    def input(self) -> Fp8Input | None:
        """Of the experts, and of the shared expert where both want the same."""
        return self._experts.input if self._shared is None or self._one_input else None

    def told_of(self, own: Tensor) -> Tensor:
        """Each rank routes the rows it keeps, as they are before anything rounds them for the way."""
        routed = self._routing.of(own, None)
        return torch.cat((routed.ids, routed.weights.view(torch.int32)), dim=1)

    def of_gathered(self, rows: Activations, told: Tensor | None) -> Tensor:
        assert told is not None
        ids, weights = (part.contiguous() for part in told.chunk(2, dim=1))
        shared = None
        if self._shared is not None:
            shared = self._shared(rows)
        wanted = self._experts.input
        return self._experts(
            rows if wanted is None else wanted.quantize(rows), weights.view(torch.float32), ids, shared
        )

    def after_norm(self, norm: RmsNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        placed = self._experts.placed(len(x), self._routing.columns)
        routed, total = self._routing.after_norm(norm, x, residual, self._experts.input, placed)
        shared = None
        if self._shared is not None:
            shared = self._shared(routed.rows if self._one_input else routed.x)
        return self._experts(routed.rows, routed.weights, routed.ids, shared, placed), total

    @property
    def _one_input(self) -> bool:
        """Rows serve both, unless each has a constant scale of its own."""
        assert self._shared is not None
        wanted = self._experts.input
        return self._shared.input == wanted and (wanted is None or wanted.scale is None)


def shared_expert(weights: Weights, moe: MoeConfig, hidden_size: int, names: MoeNames) -> DenseMlp | None:
    """This rank's columns of it; None where the model has none."""
    if not moe.shared_intermediate_size:
        return None
    return DenseMlp(_shared_scope(weights, names), hidden_size, moe.shared_intermediate_size)


def _shared_among_others(weights: Weights, moe: MoeConfig, names: MoeNames, share: ExpertShare) -> Weights | None:
    """The shared expert's scope where it can be one of the others: of their width, kind and cut."""
    if moe.shared_intermediate_size != moe.intermediate_size or len(share.experts) != moe.num_experts:
        return None
    scope = _shared_scope(weights, names)
    alike = all(
        stored_alike(scope.scope(name), weights.scope(f"experts.0.{name}"))
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    return scope if alike else None


def _shared_scope(weights: Weights, names: MoeNames) -> Weights:
    present = [name for name in names.shared if has_matrix(weights.scope(f"{name}.gate_proj"))]
    return weights.scope((present or names.shared)[0])
