"""One weight matrix on its way from a checkpoint to a layer: plain, e4m3 or int4, under the names each goes by.

    plain           weight
    e4m3            weight, weight_scale | weight_scale_inv, input_scale where activations have a constant scale
    int4            weight_packed, weight_scale, weight_shape

A matrix stored plain is quantised here when the engine was asked to: e4m3 with one scale a matrix, max |w| / 448; int4
with the scale of least squared error for every 128 columns of a row.

``weight_packed`` is compressed-tensors': int32 ``[out, in / 8]``, eight columns a word, the first in the lowest bits,
each value plus 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from katydid_kernels import FP8_MAX, dequantize_int4, quantize_int4
from katydid_runtime.errors import ModelFolderError
from torch import Tensor

from katydid_engine.quantization import GROUP, Scheme
from katydid_engine.weights import Weights

__all__ = [
    "BLOCK",
    "Fp8Matrix",
    "Int4Matrix",
    "Matrix",
    "PlainMatrix",
    "has_matrix",
    "pack_words",
    "quantised",
    "read_matrix",
    "skip_matrix",
    "to_fp8",
    "to_int4",
]

_E4M3 = torch.float8_e4m3fn
_SMALLEST_SCALE = 1e-12
BLOCK = 128
_WORD = 8
_CACHED_WEIGHTS = 1 << 17
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
        scale: fp32 ``[1]``, or ``[out]`` where each output row has its own, or ``[out / 128, in / 128]`` of blocks.
        input_scale: fp32 ``[1]``, the constant scale of the activations, or None for one a token (with blocks, one
            for every 128 columns of a token).
    """

    weight: Tensor
    scale: Tensor
    input_scale: Tensor | None = None

    @property
    def of_blocks(self) -> bool:
        return self.scale.ndim == 2

    def dequantised(self) -> Tensor:
        """fp32 ``[out, in]``."""
        return self.weight.float() * self.wide_scale()

    def wide_scale(self) -> Tensor:
        """fp32 ``[1, 1]`` or ``[out, 1]``; of blocks ``[out, in]``."""
        if not self.of_blocks:
            return self.scale[:, None]
        return self.scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)

    def with_row_scales(self) -> Fp8Matrix:
        """Rounded once more where it has scales of blocks, as it is otherwise."""
        return to_fp8(self.dequantised(), rows=True) if self.of_blocks else self


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """``codes`` int8 ``[out, lead + in]`` in -8..7, ``scales`` bf16 ``[out, ceil((lead + in) / 128)]``; activations are
    e4m3.

    Attributes:
        lead: columns of zeros that stand for what another rank has of the first group.
    """

    codes: Tensor
    scales: Tensor
    lead: int = 0

    def dequantised(self) -> Tensor:
        """fp32 ``[out, in]``."""
        return dequantize_int4(self.codes, self.scales)[:, self.lead :]


Matrix = PlainMatrix | Fp8Matrix | Int4Matrix


def has_matrix(weights: Weights) -> bool:
    """Whether the source has a matrix in this scope, of any kind."""
    return weights.has("weight") or weights.has("weight_packed")


def stored_alike(one: Weights, other: Weights) -> bool:
    """Whether the matrices in two scopes are of one kind, with scales of one shape where they have any."""
    return _kind(one) == _kind(other)


def _kind(weights: Weights) -> tuple[bool, bool, int]:
    stored, scale = weights.stored("weight"), weights.stored("weight_scale_inv") or weights.stored("weight_scale")
    fp8 = stored is not None and stored[0] == "F8_E4M3"
    return fp8, weights.has("weight_packed"), len(scale[1]) if fp8 and scale is not None else 0


def read_matrix(weights: Weights, shape: tuple[int, int], part: tuple[slice, slice], *, row_scales: bool) -> Matrix:
    """The ``part`` of the matrix ``[out, in]`` that ``weights`` (the linear's own scope) holds.

    Args:
        row_scales: whether the product takes a scale for each output row. Otherwise a matrix that has one for each is
            rounded once more, to the scale max |w| / 448 of all; so is a part that is not made of whole blocks.

    Raises:
        ModelFolderError: missing, misshaped, of another type, or without its scales.
    """
    stored = weights.stored("weight")
    if stored is not None and stored[0] == "F8_E4M3":
        return _read_fp8(weights, shape, part, row_scales)
    if weights.has("weight_packed"):
        return _read_int4(weights, shape, part)
    return quantised(weights.slice("weight", shape, part), weights.scheme)


def quantised(weight: Tensor, scheme: Scheme) -> Matrix:
    """A plain matrix ``[out, in]`` as the scheme has it."""
    if scheme is Scheme.FP8:
        return to_fp8(weight)
    return to_int4(weight, "mse") if scheme is Scheme.W4A8 else PlainMatrix(weight)


def skip_matrix(weights: Weights, shape: tuple[int, int]) -> None:
    """Checks a matrix that another rank holds."""
    stored = weights.stored("weight")
    if stored is not None and stored[0] == "F8_E4M3":
        weights.source.skip(f"{weights.prefix}weight", shape, ("F8_E4M3",))
    elif stored is not None or not weights.has("weight_packed"):
        weights.skip("weight", shape)
        return
    for name in _PARTS:
        if (companion := weights.stored(name)) is not None:
            weights.source.skip(weights.prefix + name, companion[1], (companion[0],))


def to_fp8(weight: Tensor, *, rows: bool = False, input_scale: Tensor | None = None) -> Fp8Matrix:
    """Quantises to the nearest e4m3 of ``weight / scale``, with one scale, or one for each of the ``rows``."""
    wide = weight.float()
    amax = wide.abs().amax(1) if rows else wide.abs().amax().reshape(1)
    # By a tensor: a GPU multiplies by the reciprocal of a number, and the last bit would not be a CPU's.
    scale = (amax / amax.new_full((1,), FP8_MAX)).clamp(min=_SMALLEST_SCALE)
    return Fp8Matrix((wide / scale[:, None]).to(_E4M3), scale, input_scale)


def to_int4(
    weight: Tensor,
    clip: Literal["none", "mse"],
    *,
    run: Callable[[Callable[[Tensor], tuple[Tensor, Tensor]], Iterable[Tensor]], Iterable[tuple[Tensor, Tensor]]] = map,
) -> Int4Matrix:
    """Quantises ``[out, in]`` as ``quantize_int4`` does; on a CPU some rows at a time, whose forty candidates for a
    scale then stay in its cache (a matrix of 1536 x 576 takes 0.03 s instead of 0.5).

    Args:
        run: ``map``, or an executor's, for these parts of a matrix.
    """
    rows = max(1, _CACHED_WEIGHTS // weight.shape[1]) if weight.device.type == "cpu" else len(weight)
    parts = list(run(lambda part: quantize_int4(part, clip), torch.split(weight, rows)))
    return Int4Matrix(torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts]))


def _read_fp8(weights: Weights, shape: tuple[int, int], part: tuple[slice, slice], row_scales: bool) -> Fp8Matrix:
    weight = weights.encoded("weight", shape, part, "F8_E4M3")
    input_scale = weights.numbers("input_scale")
    if not weights.quantization.static_inputs:
        input_scale = None
    elif input_scale is None or input_scale.numel() != 1:
        raise _wrong_scale(weights, "input_scale", "one number: activation scales of this checkpoint are static")
    if weights.quantization.blocks:
        scales = _block_scales(weights, shape)
        if all(cut.start % BLOCK == 0 and cut.stop % BLOCK == 0 for cut in part):
            return Fp8Matrix(weight, scales[_blocks(part[0]), _blocks(part[1])].contiguous())
        rows, columns = (torch.arange(cut.start, cut.stop, device=scales.device) // BLOCK for cut in part)
        return to_fp8(weight.float() * scales[rows][:, columns], rows=row_scales)
    scale = weights.numbers("weight_scale", "weight_scale_inv")
    if scale is None or scale.numel() not in (1, shape[0]):
        raise _wrong_scale(weights, "weight_scale", f"1 or {shape[0]} numbers")
    matrix = Fp8Matrix(weight, scale if scale.numel() == 1 else scale[part[0]], input_scale)
    if row_scales or scale.numel() == 1:
        return matrix
    return to_fp8(matrix.dequantised(), input_scale=input_scale)


def _read_int4(weights: Weights, shape: tuple[int, int], part: tuple[slice, slice]) -> Int4Matrix:
    out_size, in_size = shape
    start, stop = part[1].start, part[1].stop
    # A part that begins or ends inside a group keeps the group's scale for what it has of it.
    words = weights.encoded(
        "weight_packed", (out_size, -(-in_size // _WORD)), (part[0], slice(start // _WORD, -(-stop // _WORD))), "I32"
    )
    groups = slice(start // GROUP, -(-stop // GROUP))
    scales = weights.slice("weight_scale", (out_size, -(-in_size // GROUP)), (part[0], groups), dtype=torch.bfloat16)
    told = weights.encoded("weight_shape", (2,), (slice(0, 2),), "I64").tolist()
    if told != list(shape):
        raise ModelFolderError(
            f"tensor {weights.prefix}weight_shape is {told}, expected {list(shape)}",
            field=f"{weights.prefix}weight_shape",
            value=told,
            allowed=str(list(shape)),
        )
    first, lead = start % _WORD, start % GROUP
    codes = _unpack_words(words)[:, first : first + stop - start]
    return Int4Matrix(F.pad(codes, (lead, 0)).contiguous(), scales, lead)


def pack_words(codes: Tensor) -> Tensor:
    """int8 ``[out, in]`` in -8..7 as compressed-tensors stores it, int32 ``[out, ceil(in / 8)]``."""
    padded = F.pad(codes.to(torch.int32) + 8, (0, -codes.shape[1] % _WORD)).reshape(len(codes), -1, _WORD)
    # The eighth value reaches the sign bit, so it is put there by wrapping around and not by adding.
    words: Tensor = padded[..., 0].clone()
    for index in range(1, _WORD):
        words |= padded[..., index] << 4 * index
    return words


def _unpack_words(words: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return (((words[..., None] >> shifts) & 15) - 8).to(torch.int8).flatten(1)


def _block_scales(weights: Weights, shape: tuple[int, int]) -> Tensor:
    """fp32 ``[ceil(out / 128), ceil(in / 128)]`` of the whole matrix."""
    grid = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    name = "weight_scale_inv" if weights.has("weight_scale_inv") else "weight_scale"
    stored = weights.stored(name)
    if stored is None or stored[1] != grid:
        raise _wrong_scale(weights, name, f"shape {list(grid)}: a scale a block of {BLOCK} x {BLOCK}")
    return weights.slice(name, grid, (slice(0, grid[0]), slice(0, grid[1])), dtype=torch.float32)


def _blocks(cut: slice) -> slice:
    return slice(cut.start // BLOCK, cut.stop // BLOCK)


def _wrong_scale(weights: Weights, name: str, allowed: str) -> ModelFolderError:
    stored = weights.stored(name)
    found = "is missing" if stored is None else f"has shape {list(stored[1])}"
    return ModelFolderError(
        f"tensor {weights.prefix}{name} {found}, expected {allowed}", field=weights.prefix + name, allowed=allowed
    )
