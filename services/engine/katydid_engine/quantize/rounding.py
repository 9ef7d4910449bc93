"""The two formats a matrix can be rounded to, each with its scales: int4 in groups of 128 columns, e4m3 as a whole,
by rows or in blocks.

What is rounded is a stack ``[B, N, K]``: B times the same matrices one above the other, that are multiplied with the
same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from katydid_kernels import dequantize_int4, quantize_int4
from torch import Tensor

from katydid_engine.matrices import Fp8Matrix, Int4Matrix
from katydid_engine.quantization import GROUP
from katydid_engine.quantize.gptq import E4M3, gptq, refit_scales
from katydid_engine.quantize.parts import Fp8Scales
from katydid_engine.quantize.recipe import Gptq

__all__ = ["Fp8Rounding", "Int4Rounding", "Rounded", "Rounding"]

_E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class Rounded:
    """``codes [B, N, K]`` over ``scales [B, N, groups]``, and the weight fp32 ``[B, N, K]`` that they stand for."""

    codes: Tensor
    scales: Tensor
    weight: Tensor


class Rounding(Protocol):
    def plain(self, weight: Tensor) -> Rounded:
        """To the nearest value, nothing clipped."""
        ...

    def nearest(self, weight: Tensor) -> Rounded:
        """Without a look at any rows."""
        ...

    def by_hessian(self, weight: Tensor, hessian: Tensor, options: Gptq) -> Rounded:
        """For rows whose x x^T sum up to ``hessian``, fp32 ``[B, K, K]``."""
        ...

    def matrix(self, rounded: Rounded, index: int, rows: slice) -> Int4Matrix | Fp8Matrix:
        """One of the matrices, as it is stored."""
        ...


class Int4Rounding:
    """Args:
    clip: of the scales, "mse" or "none".
    """

    def __init__(self, clip: Literal["none", "mse"]) -> None:
        self._clip = clip

    def plain(self, weight: Tensor) -> Rounded:
        return _int4(*quantize_int4(weight))

    def nearest(self, weight: Tensor) -> Rounded:
        return _int4(*quantize_int4(weight, self._clip))

    def by_hessian(self, weight: Tensor, hessian: Tensor, options: Gptq) -> Rounded:
        # Columns count by the rms of what they are multiplied with. Its square, which the error that is minimised has,
        # was found worse: GPTQ moves much of the error of those columns to the others.
        importance = hessian.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        _, scales = quantize_int4(weight, self._clip, importance if self._clip == "mse" else None)
        codes = gptq(weight, hessian, scales, damping=options.damping, act_order=options.act_order)
        if options.refit_scales:
            scales = refit_scales(weight, hessian, codes, damping=options.damping)
        return _int4(codes, scales)

    def matrix(self, rounded: Rounded, index: int, rows: slice) -> Int4Matrix:
        return Int4Matrix(rounded.codes[index, rows].clone(), rounded.scales[index, rows].clone())


class Fp8Rounding:
    """Args:
    heights: rows of each of the matrices.
    stand_for: what one scale stands for.
    """

    def __init__(self, heights: Sequence[int], stand_for: Fp8Scales = "tensor") -> None:
        self._heights = list(heights)
        self._stand_for = stand_for

    def plain(self, weight: Tensor) -> Rounded:
        return self.nearest(weight)

    def nearest(self, weight: Tensor) -> Rounded:
        scales = self._scales(weight)
        return _e4m3((weight / _widened(scales, weight)).to(torch.float8_e4m3fn), scales)

    def by_hessian(self, weight: Tensor, hessian: Tensor, options: Gptq) -> Rounded:
        scales = self._scales(weight)
        return _e4m3(
            gptq(weight, hessian, scales, damping=options.damping, act_order=options.act_order, grid=E4M3), scales
        )

    def matrix(self, rounded: Rounded, index: int, rows: slice) -> Fp8Matrix:
        scales = rounded.scales[index, rows]
        stored = {"tensor": scales[0], "channel": scales[:, 0], "block": scales[::GROUP]}[self._stand_for]
        return Fp8Matrix(rounded.codes[index, rows].clone(), stored.clone())

    def _scales(self, weight: Tensor) -> Tensor:
        """``[B, N, 1]``, of blocks ``[B, N, K / 128]``."""
        largest = torch.cat([self._largest(part) for part in torch.split(weight, self._heights, 1)], 1)
        # By a tensor: a GPU multiplies by the reciprocal of a number, and the last bit would not be a CPU's.
        return (largest / largest.new_full((1,), _E4M3_LARGEST)).clamp(min=1e-12)

    def _largest(self, weight: Tensor) -> Tensor:
        """Magnitudes of what shares a scale, for every row."""
        if self._stand_for == "block":
            stack, rows, columns = weight.shape
            tiles = weight.abs().view(stack, rows // GROUP, GROUP, columns // GROUP, GROUP)
            return tiles.amax((2, 4)).repeat_interleave(GROUP, 1)
        if self._stand_for == "channel":
            return weight.abs().amax(2, keepdim=True)
        return weight.abs().amax((1, 2), keepdim=True).expand(-1, weight.shape[1], 1)


def _int4(codes: Tensor, scales: Tensor) -> Rounded:
    return Rounded(codes, scales, dequantize_int4(codes, scales))


def _e4m3(codes: Tensor, scales: Tensor) -> Rounded:
    return Rounded(codes, scales, codes.float() * _widened(scales, codes))


def _widened(scales: Tensor, weight: Tensor) -> Tensor:
    """Of e4m3, to be multiplied with ``[B, N, K]``."""
    return scales if scales.shape[-1] == 1 else scales.repeat_interleave(GROUP, -1)[..., : weight.shape[-1]]
