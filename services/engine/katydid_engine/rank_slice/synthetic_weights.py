"""Weights of no checkpoint, quantised as a checkpoint would store them, made on the device in seconds.

A slice of Hy3 has 15,000 expert matrices. Drawing, rounding and scaling each would take minutes; here every matrix is a
window into one pool of random codes, at a place of its own, and the layers copy it as they would copy a file's.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from katydid_engine.quantization import UNQUANTISED, Scheme, StoredQuantization
from katydid_engine.weights import FLOATS

__all__ = ["DEVIATION", "SyntheticWeights"]

DEVIATION = 0.02
# e4m3 codes are drawn so that four deviations fill the range; int4 codes are even over -7..7: with a mean other than
# zero all tokens would come to look alike, and choose the same experts.
_FP8_SCALE = 4 * DEVIATION / 448
_INT4_SCALE = DEVIATION / 4.32
_CODES_A_WORD = 8
_ALIGNMENT = 64
_SEED = 20


class SyntheticWeights:
    """A ``TensorSource`` whose projections are stored in ``scheme``; matrices have a deviation of 0.02, norms are one.

    Args:
        pool: numbers drawn of each kind; a larger matrix is drawn on its own.
        bias: the selection bias of a router, fp32 ``[experts]``, by the tensor's name; None for zeros.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        scheme: Scheme,
        *,
        pool: int,
        bias: Callable[[str, int], Tensor] | None = None,
    ) -> None:
        self.quantization = UNQUANTISED if scheme is Scheme.NONE else StoredQuantization(scheme)
        self._device = device
        self._dtype = dtype
        self._scheme = scheme
        self._size = pool
        self._bias = bias
        self._pools: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        return self.stored(name) is not None

    def stored(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Of projections and what belongs to them; everything else is there under the first of its names."""
        matrix, _, part = name.rpartition(".")
        if not matrix.endswith("_proj") or matrix.endswith("eh_proj"):
            return None
        if self._scheme is Scheme.FP8:
            return {"weight": ("F8_E4M3", ()), "weight_scale": ("F32", (1,))}.get(part)
        if self._scheme is Scheme.W4A8:
            return {"weight_packed": ("I32", ()), "weight_scale": ("BF16", ()), "weight_shape": ("I64", (2,))}.get(part)
        return None

    def read(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...], dtypes: tuple[str, ...] = FLOATS
    ) -> Tensor:
        size = [len(range(*cut.indices(n))) for n, cut in zip(shape, part, strict=True)]
        matrix, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            self._shapes[matrix] = (shape[0], 8 * shape[1])
        if kind == "weight_shape":
            return torch.tensor(self._shapes[matrix])
        if kind == "weight_scale":
            scale = _FP8_SCALE if self._scheme is Scheme.FP8 else _INT4_SCALE
            return torch.full(size, scale, device=self._device, dtype=self._dtype)
        if len(size) == 1:
            if kind.endswith("bias"):
                return self._vector_bias(name, size[0])
            return torch.ones(size, device=self._device, dtype=self._dtype)
        return self._window(f"{name}{part}", size, "I32" if "I32" in dtypes else dtypes[0])

    def skip(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> None:
        """Every name exists."""

    def _vector_bias(self, name: str, size: int) -> Tensor:
        if self._bias is None:
            return torch.zeros(size, device=self._device)
        return self._bias(name, size).to(self._device)

    def _window(self, key: str, size: list[int], kind: str) -> Tensor:
        count = math.prod(size)
        if count > self._size:
            return self._draw(count, kind, zlib.crc32(key.encode())).view(size)
        if kind not in self._pools:
            # Windows of equal matrices begin at different places, but not all of them end within the pool's size.
            self._pools[kind] = self._draw(2 * self._size, kind, _SEED)
        start = zlib.crc32(key.encode()) % (self._size // _ALIGNMENT) * _ALIGNMENT
        return self._pools[kind][start : start + count].view(size)

    def _draw(self, count: int, kind: str, seed: int) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(seed)
        if kind == "I32":
            words = torch.zeros(count, dtype=torch.int32, device=self._device)
            for place in range(_CODES_A_WORD):
                # As stored, plus 8.
                code = torch.randint(1, 16, (count,), generator=generator, device=self._device, dtype=torch.int32)
                words |= code << 4 * place
            return words
        if kind == "F8_E4M3":
            drawn = torch.empty(count, device=self._device, dtype=torch.bfloat16)
            drawn.normal_(0.0, DEVIATION / _FP8_SCALE, generator=generator).clamp_(-448, 448)
            return drawn.to(torch.float8_e4m3fn)
        return torch.empty(count, device=self._device, dtype=self._dtype).normal_(0.0, DEVIATION, generator=generator)
