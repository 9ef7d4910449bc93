"""Where layers get their tensors: each asks for its own share by name and shape, whatever the source behind it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["RandomSource", "TensorSource", "Weights"]


class TensorSource(Protocol):
    """Named tensors of a whole model."""

    def has(self, name: str) -> bool:
        """Whether the source holds a tensor of this name."""
        ...

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
        """The ``part`` of the tensor ``name``, whose whole shape must be ``shape``.

        Raises:
            ModelFolderError: no such tensor, or another shape or type.
        """
        ...

    def skip(self, name: str, shape: tuple[int, ...]) -> None:
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
    """

    source: TensorSource
    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    size: int = 1
    prefix: str = ""

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

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
        size = [len(range(*cut.indices(n))) for n, cut in zip(shape, part, strict=True)]
        if len(size) == 1:
            return torch.ones(size, device=self._device, dtype=self._dtype)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{name}{part}".encode()))
        return torch.empty(size, device=self._device, dtype=self._dtype).normal_(0.0, 0.02, generator=generator)

    def skip(self, name: str, shape: tuple[int, ...]) -> None:
        """Every name exists."""
