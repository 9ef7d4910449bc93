"""Linear layers cut over a TP group: by output rows (each rank makes some columns of y), or by input columns (each
rank makes a summand of y, which the residual exchange adds up). What a layer multiplies with is a product of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from katydid_kernels import linear, linear_fp8, linear_w4a8, pack_int4, segment_scale
from katydid_kernels.linear_few import linear_few, takes_few
from katydid_runtime.errors import ModelFolderError
from torch import Tensor

from katydid_engine.layers.activations import Activations, Fp8Input
from katydid_engine.matrices import BLOCK, Fp8Matrix, Int4Matrix, Matrix, PlainMatrix, read_matrix
from katydid_engine.weights import Weights

__all__ = ["ColumnLinear", "RowLinear"]


class Product(Protocol):
    """y = x W^T + b with weights of one kind; ``input`` is what it wants of x, None for plain rows."""

    @property
    def input(self) -> Fp8Input | None: ...

    def __call__(self, x: Activations) -> Tensor: ...


class PlainProduct:
    """Weights in the dtype of x."""

    input = None

    def __init__(self, matrices: Sequence[PlainMatrix], bias: Tensor | None) -> None:
        self._weight = torch.cat([matrix.weight for matrix in matrices])
        self._bias = bias

    def __call__(self, x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        return linear(x, self._weight, self._bias)


class Fp8Product:
    """Weights and rows in e4m3. Each matrix keeps its scale; constant scales of x are joined to the largest."""

    def __init__(self, matrices: Sequence[Fp8Matrix], bias: Tensor | None, dtype: torch.dtype) -> None:
        of_blocks = all(matrix.of_blocks for matrix in matrices)
        if not of_blocks:
            matrices = [matrix.with_row_scales() for matrix in matrices]
        self._weight = torch.cat([matrix.weight for matrix in matrices])
        self._scale = torch.cat([matrix.scale for matrix in matrices]) if of_blocks else _joined_scale(matrices)
        self._bias = bias
        self._dtype = dtype
        input_scales = [matrix.input_scale for matrix in matrices if matrix.input_scale is not None]
        input_scale = torch.cat(input_scales).amax().reshape(1) if input_scales else None
        self.input = Fp8Input(input_scale, BLOCK if of_blocks else None)

    def __call__(self, x: Activations) -> Tensor:
        values = x if isinstance(x, Tensor) else x.values
        if self.input.group is None and takes_few(values, self._weight):
            scale = self.input.scale if isinstance(x, Tensor) else x.scale
            return linear_few(values, self._weight, self._scale, x_scale=scale, bias=self._bias, out_dtype=self._dtype)
        rows = self.input.quantize(x)
        return linear_fp8(rows.values, self._weight, rows.scale, self._scale, bias=self._bias, out_dtype=self._dtype)


class Int4Product:
    """Weights in int4, rows in e4m3 with a scale a token; a part that begins inside a group has zeros before it."""

    def __init__(self, matrices: Sequence[Int4Matrix], bias: Tensor | None, dtype: torch.dtype) -> None:
        codes = torch.cat([matrix.codes for matrix in matrices])
        self._weight = pack_int4(codes, torch.cat([matrix.scales for matrix in matrices]))
        self._lead = matrices[0].lead
        self._bias = bias
        self._dtype = dtype
        self.input = Fp8Input()

    def __call__(self, x: Activations) -> Tensor:
        values, scale = (x, None) if isinstance(x, Tensor) else (x.values, x.scale)
        if self._lead:
            bits = torch.uint8 if values.element_size() == 1 else values.dtype
            values = F.pad(values.view(bits), (self._lead, 0)).view(values.dtype)
        return linear_w4a8(values, self._weight, scale, bias=self._bias).to(self._dtype)


class ColumnLinear:
    """Several projections of one input as a single product; each is cut by its output rows."""

    def __init__(
        self,
        weights: Weights,
        projections: Sequence[tuple[str, int]],
        in_size: int,
        *,
        bias: bool,
        copies: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """``projections`` are (name, output size over all ranks); ``copies`` tells of those of which so many ranks in a
        row hold the same part."""
        scopes = [(_repeated(weights, copies.get(name, 1)).scope(name), out) for name, out in projections]
        matrices = [
            read_matrix(scope, (out, in_size), (_share(scope, out), slice(0, in_size)), row_scales=True)
            for scope, out in scopes
        ]
        biases = [scope.tensor("bias", (out,), shard=0) for scope, out in scopes] if bias else []
        self._product = _product(weights, matrices, torch.cat(biases) if bias else None)
        self.input = self._product.input

    def __call__(self, x: Activations) -> Tensor:
        return self._product(x)


class RowLinear:
    """The result is this rank's summand, so only the first rank adds the bias.

    Args:
        parts: of the output's columns, which ``in_parts`` yields one by one: one is sent while the next is made.
    """

    def __init__(self, weights: Weights, in_size: int, out_size: int, *, bias: bool, parts: int = 1) -> None:
        addend = weights.tensor("bias", (out_size,)) if bias else None
        if weights.rank:
            addend = None
        self._products = []
        for part in range(parts):
            rows = slice(part * out_size // parts, (part + 1) * out_size // parts)
            matrix = read_matrix(weights, (out_size, in_size), (rows, _share(weights, in_size)), row_scales=True)
            self._products.append(_product(weights, [matrix], None if addend is None else addend[rows]))
        self.input = self._products[0].input

    def __call__(self, x: Activations) -> Tensor:
        parts = list(self.in_parts(x))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def in_parts(self, x: Activations) -> Iterator[Tensor]:
        """``[T, out_size / parts]`` each, made as they are asked for."""
        for product in self._products:
            yield product(x)


def _share(weights: Weights, size: int) -> slice:
    """This rank's part of a dimension, which the loader has checked to be divisible."""
    step = size // weights.size
    return slice(weights.rank * step, (weights.rank + 1) * step)


def _repeated(weights: Weights, copies: int) -> Weights:
    """The weights as one of fewer ranks sees them, ``copies`` ranks in a row standing for it."""
    return replace(weights, rank=weights.rank // copies, size=weights.size // copies)


def _product(weights: Weights, matrices: Sequence[Matrix], bias: Tensor | None) -> Product:
    if plain := _all_of(PlainMatrix, matrices):
        return PlainProduct(plain, bias)
    if fp8 := _all_of(Fp8Matrix, matrices):
        return Fp8Product(fp8, bias, weights.dtype)
    if int4 := _all_of(Int4Matrix, matrices):
        return Int4Product(int4, bias, weights.dtype)
    raise ModelFolderError(
        f"projections under {weights.prefix} are multiplied as one, but they are not stored alike",
        field=weights.prefix.rstrip("."),
        allowed="all plain, all fp8 or all int4",
    )


_Kind = TypeVar("_Kind", PlainMatrix, Fp8Matrix, Int4Matrix)


def _all_of(kind: type[_Kind], matrices: Sequence[Matrix]) -> list[_Kind]:
    """The matrices where every one is of a kind, else nothing."""
    found = [matrix for matrix in matrices if isinstance(matrix, kind)]
    return found if len(found) == len(matrices) else []


def _joined_scale(matrices: Sequence[Fp8Matrix]) -> Tensor:
    """One scale for all rows, or one a row."""
    if len(matrices) == 1:
        return matrices[0].scale
    sizes = [len(matrix.weight) for matrix in matrices]
    if all(matrix.scale.numel() == 1 for matrix in matrices):
        return segment_scale(torch.cat([matrix.scale for matrix in matrices]), sizes)
    return torch.cat([matrix.scale.expand(size) for matrix, size in zip(matrices, sizes, strict=True)])
