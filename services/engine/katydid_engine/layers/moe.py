"""The sparse feed-forward block: a router, routed experts, and perhaps a shared expert that every token passes.

Experts are cut over the TP group by id (expert parallel) or by column like a dense block; either way a rank's result is
its summand, and the shared expert is cut by column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from katydid_kernels import fused_moe, router
from torch import Tensor

from katydid_engine.layers.mlp import DenseMlp
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
    """Router replicated, experts and shared expert cut."""

    def __init__(
        self, weights: Weights, moe: MoeConfig, hidden_size: int, names: MoeNames, *, expert_parallel: bool
    ) -> None:
        self._moe = moe
        self._router_weight = weights.tensor(names.router, (moe.num_experts, hidden_size), dtype=torch.float32)
        self._selection_bias = (
            weights.tensor(names.selection_bias, (moe.num_experts,), dtype=torch.float32)
            if names.selection_bias is not None
            else None
        )
        self._first_expert, self._w13, self._w2 = _load_experts(weights, moe, hidden_size, expert_parallel)
        self._shared: DenseMlp | None = None
        if moe.shared_intermediate_size:
            present = [name for name in names.shared if weights.has(f"{name}.gate_proj.weight")]
            scope = weights.scope((present or names.shared)[0])
            self._shared = DenseMlp(scope, hidden_size, moe.shared_intermediate_size)

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, hidden] -> [T, hidden]``."""
        topk_weights, topk_ids = router(
            x,
            self._router_weight,
            top_k=self._moe.top_k,
            scoring=self._moe.scoring,
            selection_bias=self._selection_bias,
            renormalise=self._moe.renormalise,
            scale=self._moe.routed_scale,
        )
        shared = None if self._shared is None else self._shared(x)
        return fused_moe(
            x, self._w13, self._w2, topk_weights, topk_ids, first_expert=self._first_expert, shared_output=shared
        )


def _load_experts(
    weights: Weights, moe: MoeConfig, hidden_size: int, expert_parallel: bool
) -> tuple[int, Tensor, Tensor]:
    """Returns the id of this rank's first expert, w13 ``[E, 2n, hidden]`` and w2 ``[E, hidden, n]``."""
    width = moe.intermediate_size
    if expert_parallel:
        count = moe.num_experts // weights.size
        first = weights.rank * count
        columns = slice(0, width)
    else:
        count, first = moe.num_experts, 0
        step = width // weights.size
        columns = slice(weights.rank * step, (weights.rank + 1) * step)
    local_width = columns.stop - columns.start
    w13 = torch.empty(count, 2 * local_width, hidden_size, device=weights.device, dtype=weights.dtype)
    w2 = torch.empty(count, hidden_size, local_width, device=weights.device, dtype=weights.dtype)
    every_column = slice(0, hidden_size)
    if weights.has("experts.gate_up_proj"):
        # transformers 5 can save a layer's experts as one tensor.
        gate_up_shape, down_shape = (moe.num_experts, 2 * width, hidden_size), (moe.num_experts, hidden_size, width)
        ours = slice(first, first + count)
        up_columns = slice(width + columns.start, width + columns.stop)
        w13[:, :local_width] = weights.slice("experts.gate_up_proj", gate_up_shape, (ours, columns, every_column))
        w13[:, local_width:] = weights.slice("experts.gate_up_proj", gate_up_shape, (ours, up_columns, every_column))
        w2[:] = weights.slice("experts.down_proj", down_shape, (ours, every_column, columns))
        return first, w13, w2
    for expert in range(moe.num_experts):
        scope = weights.scope(f"experts.{expert}")
        local = expert - first
        if not 0 <= local < count:
            scope.skip("gate_proj.weight", (width, hidden_size))
            scope.skip("up_proj.weight", (width, hidden_size))
            scope.skip("down_proj.weight", (hidden_size, width))
            continue
        w13[local, :local_width] = scope.slice("gate_proj.weight", (width, hidden_size), (columns, every_column))
        w13[local, local_width:] = scope.slice("up_proj.weight", (width, hidden_size), (columns, every_column))
        w2[local] = scope.slice("down_proj.weight", (hidden_size, width), (every_column, columns))
    return first, w13, w2
