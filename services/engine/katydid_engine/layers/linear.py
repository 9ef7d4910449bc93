"""Linear layers cut over a TP group: by output rows (each rank makes some columns of y), or by input columns (each
rank makes a summand of y, which the residual exchange adds up)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from katydid_kernels import linear
from torch import Tensor

from katydid_engine.weights import Weights

__all__ = ["ColumnLinear", "RowLinear"]


class ColumnLinear:
    """Several projections of one input as a single product; each is cut by its output rows.

    ``weight`` is ``[sum(out) / tp, in]``: this rank's rows of the first projection, then of the second, and so on.
    """

    def __init__(self, weights: Weights, projections: Sequence[tuple[str, int]], in_size: int, *, bias: bool) -> None:
        """``projections`` are (name, output size over all ranks)."""
        scopes = [(weights.scope(name), out) for name, out in projections]
        self.weight = torch.cat([scope.tensor("weight", (out, in_size), shard=0) for scope, out in scopes])
        self.bias = torch.cat([scope.tensor("bias", (out,), shard=0) for scope, out in scopes]) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RowLinear:
    """``weight [out, in / tp]``; the result is this rank's summand, so only the first rank adds the bias."""

    def __init__(self, weights: Weights, in_size: int, out_size: int, *, bias: bool) -> None:
        self.weight = weights.tensor("weight", (out_size, in_size), shard=1)
        self.bias = weights.tensor("bias", (out_size,)) if bias else None
        if weights.rank > 0:
            self.bias = None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
