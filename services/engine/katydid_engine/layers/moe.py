"""The sparse feed-forward block: a router, routed experts, and perhaps a shared expert that every token passes.

Experts are cut over the TP group by id (expert parallel) or by column like a dense block; either way a rank's result is
its summand, and the shared expert is cut by column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from katydid_kernels import RouterWeight, router
from torch import Tensor

from katydid_engine.layers.activations import Activations, Fp8Input
from katydid_engine.layers.experts import load_experts
from katydid_engine.layers.mlp import DenseMlp
from katydid_engine.matrices import has_matrix
from katydid_engine.model_config import MoeConfig
from katydid_engine.weights import Weights

__all__ = ["MoeNames", "SparseMoe"]

Spellings = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MoeNames:
    """What checkpoints of an architecture call the parts of the block; several spellings, the usual one first."""

    router: Spellings
    selection_bias: Spellings | None = None
    shared: tuple[str, ...] = ()


class SparseMoe:
    """Router replicated, experts and shared expert cut. The router reads plain rows, which the experts' kind of
    rows is made of.

    Args:
        gain: ``[hidden]``, the weight of the norm before the block.
    """

    input = None

    def __init__(
        self,
        weights: Weights,
        moe: MoeConfig,
        hidden_size: int,
        names: MoeNames,
        gain: Tensor,
        *,
        expert_parallel: bool,
    ) -> None:
        self._moe = moe
        self._router_weight = RouterWeight.prepare(
            weights.tensor(names.router, (moe.num_experts, hidden_size), dtype=torch.float32)
        )
        self._selection_bias = (
            weights.tensor(names.selection_bias, (moe.num_experts,), dtype=torch.float32)
            if names.selection_bias is not None
            else None
        )
        self._experts = load_experts(weights, moe, hidden_size, gain, expert_parallel=expert_parallel)
        self._shared: DenseMlp | None = None
        if moe.shared_intermediate_size:
            present = [name for name in names.shared if has_matrix(weights.scope(f"{name}.gate_proj"))]
            scope = weights.scope((present or names.shared)[0])
            self._shared = DenseMlp(scope, hidden_size, moe.shared_intermediate_size)

    def __call__(self, x: Activations) -> Tensor:
        """``[T, hidden] -> [T, hidden]``."""
        assert isinstance(x, Tensor)
        topk_weights, topk_ids = router(
            x,
            self._router_weight,
            top_k=self._moe.top_k,
            scoring=self._moe.scoring,
            selection_bias=self._selection_bias,
            renormalise=self._moe.renormalise,
            scale=self._moe.routed_scale,
        )
        rows: Activations = x
        if self._experts.input is not None:
            rows = self._experts.input.quantize(x)
        shared = None
        if self._shared is not None:
            # The same rows serve both, unless each has a constant scale of its own.
            shared = self._shared(rows if self._shared.input == self._experts.input == Fp8Input() else x)
        return self._experts(rows, topk_weights, topk_ids, shared)
