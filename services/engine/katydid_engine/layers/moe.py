"""The sparse feed-forward block: a router, routed experts, and perhaps a shared expert that every token passes.

Experts are cut over the TP group by id (expert parallel) or by column like a dense block; either way a rank's result is
its summand, and the shared expert is cut by column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from katydid_kernels import RouterWeight, add_rms_norm_route, router
from torch import Tensor

from katydid_engine.layers.activations import Activations, QuantizedRows
from katydid_engine.layers.expert_loading import load_experts
from katydid_engine.layers.mlp import DenseMlp
from katydid_engine.layers.norm import RmsNorm
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
    """Router replicated, experts and shared expert cut. The router reads plain rows, of which the experts' kind
    is made.

    Args:
        gain: ``[hidden]``, the weight of the norm before the block.
    """

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
        wanted = self._experts.input
        return self._run(x, x if wanted is None else wanted.quantize(x), topk_weights, topk_ids)

    def after_norm(self, norm: RmsNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        wanted = self._experts.input
        whole_rows = wanted is not None and wanted.group is None
        routed = add_rms_norm_route(
            x,
            residual,
            norm.weight,
            norm.eps,
            self._router_weight,
            top_k=self._moe.top_k,
            scoring=self._moe.scoring,
            selection_bias=self._selection_bias,
            renormalise=self._moe.renormalise,
            scale=self._moe.routed_scale,
            fp8=whole_rows,
            fp8_scale=wanted.scale if wanted is not None and whole_rows else None,
        )
        rows: Activations = routed.y
        if routed.q is not None and routed.q_scale is not None:
            rows = QuantizedRows(routed.q, routed.q_scale)
        elif wanted is not None:
            rows = wanted.quantize(routed.y)
        return self._run(routed.y, rows, routed.weights, routed.ids), routed.total

    def _run(self, x: Tensor, rows: Activations, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """``rows`` are x as the experts want it."""
        shared = None
        if self._shared is not None:
            # They serve both, unless each has a constant scale of its own.
            same = self._shared.input == self._experts.input and self._has_no_constant_scale
            shared = self._shared(rows if same else x)
        return self._experts(rows, topk_weights, topk_ids, shared)

    @property
    def _has_no_constant_scale(self) -> bool:
        return self._experts.input is None or self._experts.input.scale is None
