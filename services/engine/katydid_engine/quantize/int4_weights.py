"""A matrix as int4 while it is made."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Int4Weights"]


@dataclass(frozen=True)
class Int4Weights:
    """int8 ``[N, K]`` in -8..7 and bf16 ``[N, ceil(K / 128)]``."""

    codes: Tensor
    scales: Tensor
