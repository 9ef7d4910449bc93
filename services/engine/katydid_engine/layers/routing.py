"""The router of a sparse block, with or without the norm before it in the same pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from katydid_kernels import RouterWeight, add_rms_norm_route, router
from katydid_kernels.gemm.plan import PlacedPairs
from torch import Tensor

from katydid_engine.layers.activations import Activations, Fp8Input, QuantizedRows
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.model_config import MoeConfig
from katydid_engine.weights import Weights

__all__ = ["MoeNames", "Routed", "Routing"]

Spellings = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MoeNames:
    """What checkpoints of an architecture call the parts of the block; several spellings, the usual one first."""

    router: Spellings
    selection_bias: Spellings | None = None
    shared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Routed:
    """Rows and where they go.

    Attributes:
        x: plain, ``[T, hidden]``.
        rows: the same as the experts want them.
        weights: fp32 ``[T, top_k]``, a column more with a shared expert among the others.
        ids: int32, likewise, over the model's experts.
    """

    x: Tensor
    rows: Activations
    weights: Tensor
    ids: Tensor


class Routing:
    """Replicated on every rank; it reads plain rows, of which the experts' kind is made. ``shared``: every token goes
    to one more expert, which stands behind the others, with weight 1."""

    def __init__(
        self, weights: Weights, moe: MoeConfig, hidden_size: int, names: MoeNames, *, shared: bool = False
    ) -> None:
        self._moe = moe
        self._shared = shared
        self._weight = RouterWeight.prepare(
            weights.tensor(names.router, (moe.num_experts, hidden_size), dtype=torch.float32)
        )
        self._selection_bias = (
            weights.tensor(names.selection_bias, (moe.num_experts,), dtype=torch.float32)
            if names.selection_bias is not None
            else None
        )

    def of(self, x: Tensor, wanted: Fp8Input | None) -> Routed:
        """Of normed rows ``[T, hidden]``."""
        weights, ids = router(
            x,
            self._weight,
            top_k=self._moe.top_k,
            scoring=self._moe.scoring,
            selection_bias=self._selection_bias,
            renormalise=self._moe.renormalise,
            scale=self._moe.routed_scale,
            shared=self._shared,
        )
        return Routed(x, x if wanted is None else wanted.quantize(x), weights, ids)

    @property
    def columns(self) -> int:
        """Of ids and weights."""
        return self._moe.top_k + self._shared

    def after_norm(
        self,
        norm: RmsNorm,
        x: Tensor,
        residual: Tensor,
        wanted: Fp8Input | None,
        placed: PlacedPairs | None = None,
    ) -> tuple[Routed, Tensor]:
        """Of ``norm(x + residual)``, and that sum; fills the plan of ``placed``."""
        whole_rows = wanted is not None and wanted.group is None
        routed = add_rms_norm_route(
            x,
            residual,
            norm.weight,
            norm.eps,
            self._weight,
            top_k=self._moe.top_k,
            scoring=self._moe.scoring,
            selection_bias=self._selection_bias,
            renormalise=self._moe.renormalise,
            scale=self._moe.routed_scale,
            shared=self._shared,
            fp8=whole_rows,
            fp8_scale=wanted.scale if wanted is not None and whole_rows else None,
            placed=placed,
        )
        rows: Activations = routed.y
        if routed.q is not None and routed.q_scale is not None:
            rows = QuantizedRows(routed.q, routed.q_scale)
        elif wanted is not None:
            rows = wanted.quantize(routed.y)
        return Routed(routed.y, rows, routed.weights, routed.ids), routed.total
