"""Where layers get their tensors: each asks for its own share by name and shape, whatever the source behind it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from katydid_engine.quantization import UNQUANTISED, Scheme, StoredQuantization

__all__ = ["FLOATS", "RandomSource", "TensorSource", "Weights"]

FLOATS = ("BF16", "F16", "F32")


class TensorSource(Protocol):
    """Named tensors of a whole model."""

    def has(self, name: str) -> bool:
        """Whether the source holds a tensor of this name."""
        ...

    def stored(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Type (as safetensors spells it, "BF16") and shape of a tensor; None where the source has none."""
        ...

    def read(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...], dtypes: tuple[str, ...] = FLOATS
    ) -> Tensor:
        """The ``part`` of the tensor ``name``, whose whole shape must be ``shape`` and its type one of ``dtypes``.

        Raises:
            ModelFolderError: no such tensor, or another shape or type.
        """
        ...

    def skip(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> None:
        """Checks a tensor as ``read`` does without reading it (another rank holds it)."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """A source seen by one layer of one rank.

    Attributes:
        source: tensors of the whole model.
        device, dtype: what tensors become unless asked otherwise.
        rank, size: this rank in its TP group; a sharded dimension is cut into ``size`` equal parts.
        prefix: prepended to every name ("model.layers.3.").
        quantization: how the source stores its linear weights.
        scheme: what linear weights that it stores unquantised become.
    """

    source: TensorSource
    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    size: int = 1
    prefix: str = ""
    quantization: StoredQuantization = UNQUANTISED
    scheme: Scheme = Scheme.NONE

    def scope(self, name: str) -> Weights:
        """The same source one level down."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        return self.source.has(self.prefix + name)

    def tensor(
        self,
        spellings: str | tuple[str, ...],
        shape: tuple[int, ...],
        *,
        shard: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """This rank's part of a tensor.

        Args:
            spellings: its name, or the names it goes by in different checkpoints, the usual one first.
            shape: of the whole tensor.
            shard: dimension that is cut over the TP group; None when every rank holds it whole.

        Raises:
            ModelFolderError: missing, misshaped or of a type that is not a float.
        """
        part = [slice(0, n) for n in shape]
        if shard is not None:
            if shape[shard] % self.size:
                raise ValueError(f"{spellings}: dimension {shard} of {shape} does not split over {self.size} ranks")
            step = shape[shard] // self.size
            part[shard] = slice(self.rank * step, (self.rank + 1) * step)
        return self.slice(spellings, shape, tuple(part), dtype=dtype)

    def encoded(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...], dtype: str) -> Tensor:
        """An explicit part of a tensor that must be stored as ``dtype``, with the bytes it has there."""
        return self.source.read(self.prefix + name, shape, part, (dtype,)).to(self.device)

    def slice(
        self,
        spellings: str | tuple[str, ...],
        shape: tuple[int, ...],
        part: tuple[slice, ...],
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """An explicit part of a tensor; otherwise as ``tensor``."""
        tensor = self.source.read(self._resolve(spellings), shape, part)
        return tensor.to(device=self.device, dtype=dtype or self.dtype)

    def stored(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Type and shape of a tensor in the source."""
        return self.source.stored(self.prefix + name)

    def numbers(self, *spellings: str) -> Tensor | None:
        """A small tensor of whatever shape, scales above all: fp32 ``[n]``, or None where the source has none."""
        for name in spellings:
            stored = self.stored(name)
            if stored is not None:
                part = tuple(slice(0, n) for n in stored[1])
                return self.source.read(self.prefix + name, stored[1], part).to(self.device, torch.float32).reshape(-1)
        return None

    def skip(self, spellings: str | tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Checks a tensor that another rank holds."""
        self.source.skip(self._resolve(spellings), shape)

    def _resolve(self, spellings: str | tuple[str, ...]) -> str:
        names = (spellings,) if isinstance(spellings, str) else spellings
        present = [name for name in names if self.has(name)]
        return self.prefix + (present or names)[0]


class RandomSource:
    """Synthetic weights: the same values for a name and part whatever else is read; for timing without a checkpoint.

    Matrices are normal with deviation 0.02, vectors (norms) one.
    """

    def __init__(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self._device = torch.device(device)
        self._dtype = dtype

    def has(self, name: str) -> bool:  # noqa: ARG002
        return False

    def stored(self, name: str) -> tuple[str, tuple[int, ...]] | None:  # noqa: ARG002
        return None

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: tuple[slice, ...],
        dtypes: tuple[str, ...] = FLOATS,  # noqa: ARG002
    ) -> Tensor:
        size = [len(range(*cut.indices(n))) for n, cut in zip(shape, part, strict=True)]
        if len(size) == 1:
            return torch.ones(size, device=self._device, dtype=self._dtype)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{name}{part}".encode()))
        return torch.empty(size, device=self._device, dtype=self._dtype).normal_(0.0, 0.02, generator=generator)

    def skip(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> None:
        """Every name exists."""
