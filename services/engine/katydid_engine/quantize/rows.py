"""What becomes of rows before they are multiplied by a quantised matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from katydid_engine.quantization import GROUP
from katydid_engine.quantize.fused import fused
from katydid_engine.quantize.parts import Fp8Scales

__all__ = ["Rows", "e4m3_rows", "plain_rows", "rows_of"]

Rows = Callable[[Tensor], Tensor]


def plain_rows(x: Tensor) -> Tensor:
    """Rows of the model as it is."""
    return x


def rows_of(scales: Fp8Scales) -> Rows:
    """What is done to the rows of matrices in e4m3 with such scales, and of int4."""
    return _e4m3_groups if scales == "block" else e4m3_rows


@fused
def e4m3_rows(x: Tensor) -> Tensor:
    """Rows rounded to e4m3 under a scale for each, max |x| / 448; gradients pass as if they were not."""
    with torch.no_grad():
        scale = (x.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
        rounded = (x / scale).to(torch.float8_e4m3fn).float() * scale
    return x + (rounded - x.detach()) if x.requires_grad else rounded


def _e4m3_groups(x: Tensor) -> Tensor:
    """The same with a scale for every 128 columns."""
    return e4m3_rows(x.view(*x.shape[:-1], -1, GROUP)).flatten(-2)
