"""SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020): silu(gate) * up, the product in fp32, rounded once.

Bound by memory: two elements read for one written.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["swiglu", "swiglu_reference"]


def swiglu(gate_up: Tensor) -> Tensor:
    """``[T, 2 * n]`` (gate in the first half, up in the second) -> ``[T, n]``, same dtype."""
    return swiglu_reference(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    # Written out: torch's silu and sigmoid round the last few elements of a tensor by another path than the rest, so
    # that a row's bits would depend on the number of rows.
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)
