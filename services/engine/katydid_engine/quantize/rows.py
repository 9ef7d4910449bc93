"""What becomes of rows before they are multiplied by a quantised matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from katydid_engine.quantize.fused import fused

__all__ = ["Rows", "e4m3_rows", "plain_rows"]

Rows = Callable[[Tensor], Tensor]


def plain_rows(x: Tensor) -> Tensor:
    """Rows of the model as it is."""
    return x


@fused
def e4m3_rows(x: Tensor) -> Tensor:
    """Rows rounded to e4m3 under a scale for each, max |x| / 448; gradients pass as if they were not."""
    with torch.no_grad():
        scale = (x.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
        rounded = (x / scale).to(torch.float8_e4m3fn).float() * scale
    return x + (rounded - x.detach()) if x.requires_grad else rounded
