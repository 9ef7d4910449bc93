"""What K and V lose when their pages are e4m3: as the engine rounds them, for models in plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from katydid_engine.quantize.fused import fused
from katydid_engine.quantize.rotation import hadamard
from katydid_engine.quantize.rows import e4m3_rows

__all__ = ["HEADROOM", "PageRounding", "PageScales", "page_scales"]

# e4m3 is a float: its steps are as fine over a scale twice as large, and K and V may grow beyond what was seen.
HEADROOM = 2.0
_LARGEST = 448.0


@dataclass(frozen=True)
class PageScales:
    """fp32 ``[1]`` or ``[kv_heads]``: what e4m3 pages hold is K or V over these."""

    key: Tensor
    value: Tensor


def page_scales(largest_key: Tensor, largest_value: Tensor, *, by_head: bool) -> PageScales:
    """Out of the largest magnitudes ``[kv_heads]``."""
    largest = (
        (largest_key, largest_value) if by_head else (one.amax().reshape(1) for one in (largest_key, largest_value))
    )
    return PageScales(*(one * (HEADROOM / _LARGEST) for one in largest))


@dataclass(frozen=True)
class PageRounding:
    """Rounds q by a scale for each token and head, K and V by constants; gradients pass as if nothing was rounded.

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
        return e4m3_rows(q), _stored(k, self.scales.key.to(device)), _stored(v, self.scales.value.to(device))


@fused
def _stored(x: Tensor, scale: Tensor) -> Tensor:
    wide = scale[:, None]
    with torch.no_grad():
        rounded = (x / wide).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).float() * wide
    return x + (rounded - x.detach()) if x.requires_grad else rounded
