"""One weight matrix on its way from a checkpoint to a layer: plain, e4m3 or int4, under the names each goes by.

    plain           weight
    e4m3            weight, weight_scale | weight_scale_inv, input_scale where activations have a constant scale
    int4            weight_packed, weight_scale, weight_shape

A matrix stored plain is quantised here when the engine was asked to: e4m3 with one scale a matrix, max |w| / 448.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from katydid_kernels import FP8_MAX
from katydid_runtime.errors import ModelFolderError
from torch import Tensor

from katydid_engine.quantization import Scheme
from katydid_engine.weights import Weights

__all__ = ["Fp8Matrix", "Matrix", "PlainMatrix", "has_matrix", "quantised", "read_matrix", "skip_matrix", "to_fp8"]

_E4M3 = torch.float8_e4m3fn
_SMALLEST_SCALE = 1e-12
_BLOCK = 128
_PARTS = ("weight_scale", "weight_scale_inv", "input_scale", "weight_packed", "weight_shape")


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """``weight [out, in]`` in the engine's dtype."""

    weight: Tensor


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix that stands for ``weight * scale``.

    Attributes:
        weight: e4m3 ``[out, in]``.
        scale: fp32 ``[1]``, or ``[out]`` where each output row has its own.
        input_scale: fp32 ``[1]``, the constant scale of the activations, or None for one a token.
    """

    weight: Tensor
    scale: Tensor
    input_scale: Tensor | None = None


Matrix = PlainMatrix | Fp8Matrix


def has_matrix(weights: Weights) -> bool:
    """Whether the source has a matrix in this scope, of any kind."""
    return weights.has("weight") or weights.has("weight_packed")


def read_matrix(weights: Weights, shape: tuple[int, int], part: tuple[slice, slice], *, row_scales: bool) -> Matrix:
    """The ``part`` of the matrix ``[out, in]`` that ``weights`` (the linear's own scope) holds.

    Args:
        row_scales: whether the product takes a scale for each output row. Otherwise a matrix that has several is
            rounded once more, to the one scale max |w| / 448; 128 x 128 blocks always are.

    Raises:
        ModelFolderError: missing, misshaped, of another type, or without its scales.
    """
    stored = weights.stored("weight")
    if stored is not None and stored[0] == "F8_E4M3":
        return _read_fp8(weights, shape, part, row_scales)
    return quantised(weights.slice("weight", shape, part), weights.scheme)


def quantised(weight: Tensor, scheme: Scheme) -> Matrix:
    """A plain matrix ``[out, in]`` as the scheme has it."""
    return to_fp8(weight) if scheme is Scheme.FP8 else PlainMatrix(weight)


def skip_matrix(weights: Weights, shape: tuple[int, int]) -> None:
    """Checks a matrix that another rank holds."""
    stored = weights.stored("weight")
    if stored is None or stored[0] != "F8_E4M3":
        weights.skip("weight", shape)
        return
    weights.source.skip(f"{weights.prefix}weight", shape, ("F8_E4M3",))
    for name in _PARTS:
        if (companion := weights.stored(name)) is not None:
            weights.source.skip(weights.prefix + name, companion[1], (companion[0],))


def to_fp8(weight: Tensor, *, rows: bool = False, input_scale: Tensor | None = None) -> Fp8Matrix:
    """Quantises to the nearest e4m3 of ``weight / scale``, with one scale, or one for each of the ``rows``."""
    wide = weight.float()
    amax = wide.abs().amax(1) if rows else wide.abs().amax().reshape(1)
    scale = (amax / FP8_MAX).clamp(min=_SMALLEST_SCALE)
    return Fp8Matrix((wide / scale[:, None]).to(_E4M3), scale, input_scale)


def _read_fp8(weights: Weights, shape: tuple[int, int], part: tuple[slice, slice], row_scales: bool) -> Fp8Matrix:
    weight = weights.encoded("weight", shape, part, "F8_E4M3")
    input_scale = weights.numbers("input_scale")
    if not weights.quantization.static_inputs:
        input_scale = None
    elif input_scale is None or input_scale.numel() != 1:
        raise _wrong_scale(weights, "input_scale", "one number: activation scales of this checkpoint are static")
    if weights.quantization.blocks:
        return to_fp8(weight.float() * _block_scales(weights, shape, part), rows=row_scales)
    scale = weights.numbers("weight_scale", "weight_scale_inv")
    if scale is None or scale.numel() not in (1, shape[0]):
        raise _wrong_scale(weights, "weight_scale", f"1 or {shape[0]} numbers")
    if scale.numel() == 1:
        return Fp8Matrix(weight, scale, input_scale)
    scale = scale[part[0]]
    if row_scales:
        return Fp8Matrix(weight, scale, input_scale)
    return to_fp8(weight.float() * scale[:, None], input_scale=input_scale)


def _block_scales(weights: Weights, shape: tuple[int, int], part: tuple[slice, slice]) -> Tensor:
    """fp32 scales, one a weight of the part."""
    grid = tuple(-(-n // _BLOCK) for n in shape)
    name = "weight_scale_inv" if weights.has("weight_scale_inv") else "weight_scale"
    stored = weights.stored(name)
    if stored is None or stored[1] != grid:
        raise _wrong_scale(weights, name, f"shape {list(grid)}: a scale a block of {_BLOCK} x {_BLOCK}")
    scales = weights.slice(name, grid, (slice(0, grid[0]), slice(0, grid[1])), dtype=torch.float32)
    rows, columns = (
        torch.arange(*cut.indices(n), device=scales.device) // _BLOCK for n, cut in zip(shape, part, strict=True)
    )
    return scales[rows][:, columns]


def _wrong_scale(weights: Weights, name: str, allowed: str) -> ModelFolderError:
    stored = weights.stored(name)
    found = "is missing" if stored is None else f"has shape {list(stored[1])}"
    return ModelFolderError(
        f"tensor {weights.prefix}{name} {found}, expected {allowed}", field=weights.prefix + name, allowed=allowed
    )
