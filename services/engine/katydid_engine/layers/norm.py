"""RMSNorm over the hidden dimension, with or without the residual addition before it and the quantisation after it."""

from __future__ import annotations

from katydid_kernels import add_rms_norm, add_rms_norm_quantize, rms_norm
from torch import Tensor

from katydid_engine.layers.activations import Activations, Fp8Input, QuantizedRows
from katydid_engine.weights import Weights

__all__ = ["RmsNorm"]


class RmsNorm:
    """Holds ``weight [size]``, replicated on every rank."""

    def __init__(self, weights: Weights, size: int, eps: float) -> None:
        self.weight = weights.tensor("weight", (size,))
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``(norm(x + residual), x + residual)``."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def add_for(self, consumer: Fp8Input | None, x: Tensor, residual: Tensor) -> tuple[Activations, Tensor]:
        """As ``add``, with the first in the form that its consumer wants."""
        if consumer is None:
            return self.add(x, residual)
        q, scale, total = add_rms_norm_quantize(
            x, residual, self.weight, self.eps, scale=consumer.scale, group=consumer.group
        )
        return QuantizedRows(q, scale), total
