"""What K and V lose when their pages are e4m3: as the engine rounds them, for models in plain arithmetic.

A vector that is taken off all keys of a head adds the same to all scores of a query, so that the softmax gives what it
gave; what is left of the keys is smaller and is rounded finer (smooth K; Zhang et al., "SageAttention", 2024). Pages
hold keys behind RoPE, which turns the mean of a head with the position: taken off is what is left of the mean on
average over all positions that a model has. Of the pairs of columns that turn often nothing is; over the whole context
the energy of keys cannot grow, whatever part of it the calibration sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from katydid_engine.quantize.fused import fused
from katydid_engine.quantize.rotation import hadamard
from katydid_engine.quantize.rows import e4m3_rows

__all__ = ["HEADROOM", "PageRounding", "PageScales", "mean_rotation", "page_scales"]

# e4m3 is a float: its steps are as fine over a scale twice as large, and K and V may grow beyond what was seen.
HEADROOM = 2.0
_LARGEST = 448.0


@dataclass(frozen=True)
class PageScales:
    """What e4m3 pages hold is V, and K without its mean, over these.

    Attributes:
        key, value: fp32 ``[1]`` or ``[kv_heads]``.
        key_mean: fp32 ``[kv_heads, head_dim]``, as pages have keys: behind RoPE, rotated where keys are; None for 0.
    """

    key: Tensor
    value: Tensor
    key_mean: Tensor | None = None


def page_scales(
    largest_key: Tensor, largest_value: Tensor, *, by_head: bool, key_mean: Tensor | None = None
) -> PageScales:
    """Out of the largest magnitudes ``[kv_heads]``, of K without its mean."""
    largest = (
        (largest_key, largest_value) if by_head else (one.amax().reshape(1) for one in (largest_key, largest_value))
    )
    key, value = (one * (HEADROOM / _LARGEST) for one in largest)
    return PageScales(key, value, key_mean)


def mean_rotation(frequencies: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """What RoPE makes of a constant key on average over the positions from 0: cosines and sines, fp32 like the
    ``frequencies`` ``[head_dim / 2]``, in radians a position."""
    half = frequencies.double() / 2
    size, middle = (half * positions).sin() / (positions * half.sin()), half * (positions - 1)
    return (size * middle.cos()).float(), (size * middle.sin()).float()


@dataclass(frozen=True)
class PageRounding:
    """Rounds q by a scale for each token and head, K without its mean and V by constants; gradients pass as if nothing
    was rounded.

    Attributes:
        rotate: q and k are multiplied by a Hadamard matrix before.
    """

    scales: PageScales
    rotate: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[S, T, heads, head_dim]``, k and v ``[S, T, kv_heads, head_dim]``, rotated where keys are."""
        if self.rotate:
            matrix = hadamard(q.shape[-1], q.device)
            q, k = q @ matrix, k @ matrix
        device = q.device
        if self.scales.key_mean is not None:
            k = k - self.scales.key_mean.to(device)
        return e4m3_rows(q), _stored(k, self.scales.key.to(device)), _stored(v, self.scales.value.to(device))


@fused
def _stored(x: Tensor, scale: Tensor) -> Tensor:
    wide = scale[:, None]
    with torch.no_grad():
        rounded = (x / wide).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).float() * wide
    return x + (rounded - x.detach()) if x.requires_grad else rounded
