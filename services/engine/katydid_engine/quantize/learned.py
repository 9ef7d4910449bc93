"""Weights that are rounded while they are learned: where each lies between two values of its format, and its scale.

Forward a weight is what will be stored; backward its gradient passes as if nothing was rounded (the straight-through
estimator; Bengio et al., 2013). Of int4 both are learned, code and scale (Cheng et al., "SignRound", 2023, and Esser et
al., "LSQ", 2020); of e4m3 the rounding alone, for a float's scale does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_engine.matrices import Fp8Matrix, Int4Matrix
from katydid_engine.quantization import GROUP
from katydid_engine.quantize.fused import fused
from katydid_engine.quantize.recipe import Distillation

__all__ = ["LearnedFp8", "LearnedInt4"]

_LOWEST, _HIGHEST = -8, 7
_E4M3_LARGEST = 448.0
_STEPS_OF_A_WEIGHT = 8  # of e4m3, which has eight between a power of two and the next: up to twice as many


class LearnedInt4:
    """Matrices of equal width, one above the other.

    Attributes:
        position: fp32 ``[rows, K]``, rounded to the code; starts on it.
        stretch: fp32 ``[rows, groups]``, the logarithm of what the scale is multiplied with.
    """

    def __init__(self, matrices: list[Int4Matrix]) -> None:
        self.position = torch.cat([matrix.codes for matrix in matrices]).float().requires_grad_()
        self._scales = torch.cat([matrix.scales for matrix in matrices]).float()
        self.stretch = torch.zeros_like(self._scales).requires_grad_()
        self._heights = [len(matrix.codes) for matrix in matrices]

    def parameters(self, options: Distillation) -> list[tuple[Tensor, float]]:
        """What is learned, and how fast."""
        scales = (self.stretch, options.learning_rate)
        return [scales, (self.position, options.rounding_rate)] if options.rounding_rate else [scales]

    def weight(self) -> Tensor:
        """fp32 ``[rows, K]``."""
        scales = self._scales * self.stretch.exp()
        return _int4(self.position, scales.repeat_interleave(GROUP, 1)[:, : self.position.shape[1]])

    @torch.no_grad()
    def matrices(self) -> list[Int4Matrix]:
        """As they are stored, in the order in which they were given."""
        scales = (self._scales * self.stretch.exp()).to(torch.bfloat16)
        parts = (torch.split(x, self._heights) for x in (_codes(self.position).to(torch.int8), scales))
        return [Int4Matrix(codes, some) for codes, some in zip(*parts, strict=True)]


class LearnedFp8:
    """Likewise in e4m3, each matrix with the scale that it has. ``position`` is in steps of a weight of usual size."""

    def __init__(self, matrices: list[Fp8Matrix]) -> None:
        values = torch.cat([matrix.weight.float() for matrix in matrices])
        self._step = values.new_tensor(float(values.square().mean().sqrt()) / _STEPS_OF_A_WEIGHT or 1.0)
        self.position = (values / self._step).requires_grad_()
        self._given = matrices
        self._heights = [len(matrix.weight) for matrix in matrices]
        self._scales = torch.cat([matrix.wide_scale().expand(len(matrix.weight), -1) for matrix in matrices])

    def parameters(self, options: Distillation) -> list[tuple[Tensor, float]]:
        return [(self.position, options.rounding_rate)] if options.rounding_rate else []

    def weight(self) -> Tensor:
        return _e4m3(self.position, self._step, self._scales)

    @torch.no_grad()
    def matrices(self) -> list[Fp8Matrix]:
        parts = torch.split(_values(self.position, self._step), self._heights)
        return [Fp8Matrix(values, given.scale) for values, given in zip(parts, self._given, strict=True)]


@fused
def _int4(position: Tensor, scales: Tensor) -> Tensor:
    return (_codes(position) + (position - position.detach())) * scales


@fused
def _e4m3(position: Tensor, step: Tensor, scales: Tensor) -> Tensor:
    return (_values(position, step).float() + step * (position - position.detach())) * scales


def _codes(position: Tensor) -> Tensor:
    return position.detach().round().clamp(_LOWEST, _HIGHEST)


def _values(position: Tensor, step: Tensor) -> Tensor:
    values = position.detach() * step
    return values.clamp(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn)
