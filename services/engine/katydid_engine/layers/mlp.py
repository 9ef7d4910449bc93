"""The dense feed-forward block: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from katydid_kernels import swiglu, swiglu_quantize
from torch import Tensor

from katydid_engine.layers.activations import Activations, QuantizedRows
from katydid_engine.layers.linear import ColumnLinear, RowLinear
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.weights import Weights

__all__ = ["DenseMlp"]


class DenseMlp:
    """This rank's columns; the result is its summand."""

    def __init__(self, weights: Weights, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        self._gate_up = ColumnLinear(
            weights, [("gate_proj", intermediate_size), ("up_proj", intermediate_size)], hidden_size, bias=bias
        )
        self._down = RowLinear(weights.scope("down_proj"), intermediate_size, hidden_size, bias=bias)
        self.input = self._gate_up.input

    def __call__(self, x: Activations) -> Tensor:
        """``[T, hidden] -> [T, hidden]``."""
        gate_up, wanted = self._gate_up(x), self._down.input
        if wanted is None:
            return self._down(swiglu(gate_up))
        return self._down(QuantizedRows(*swiglu_quantize(gate_up, scale=wanted.scale, group=wanted.group)))

    def told_of(self, own: Tensor) -> Tensor | None:  # noqa: ARG002
        return None

    def of_gathered(self, rows: Activations, told: Tensor | None) -> Tensor:  # noqa: ARG002
        return self(rows)

    def after_norm(self, norm: RmsNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        rows, total = norm.add_for(self._gate_up.input, x, residual)
        return self(rows), total
