"""What flows into products: plain rows, or rows in e4m3 with their scale, made by whatever computed them last.

A quantised product says in ``Fp8Input`` how it wants its rows; the norm or SwiGLU before it then writes them so, and
the 16-bit rows never go to memory. Where nothing can (the output of attention), the product quantises for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from katydid_kernels import quantize_fp8
from torch import Tensor

__all__ = ["Activations", "Fp8Input", "QuantizedRows"]


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """``values * scale``: e4m3 ``[T, n]`` and fp32 ``[T]``; or ``[1]`` where the scale is constant, or
    ``[T, n / group]`` of groups of columns."""

    values: Tensor
    scale: Tensor


Activations = Tensor | QuantizedRows


@dataclass(frozen=True, slots=True)
class Fp8Input:
    """e4m3 rows with one constant scale, fp32 ``[1]``, or with one a token, or for every ``group`` columns of it."""

    scale: Tensor | None = None
    group: int | None = None

    def quantize(self, x: Activations) -> QuantizedRows:
        """``[T, n]`` rows; those quantised already are returned as they are."""
        return (
            x if isinstance(x, QuantizedRows) else QuantizedRows(*quantize_fp8(x, scale=self.scale, group=self.group))
        )
