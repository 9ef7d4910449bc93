"""Rotary position embedding (Su et al., "RoFormer", 2021), NeoX form: element i of a head turns with element i + n/2.

(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), with the angle position * frequency[i] for element i of a half. Cosines
and sines come from an fp32 table: at position 262,143 a bf16 table is off by whole turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rope", "rope_reference", "rope_table"]


def rope_table(inverse_frequencies: Tensor, max_positions: int) -> Tensor:
    """fp32 ``[max_positions, head_dim]``: cosines in the first half of a row, sines in the second.

    Args:
        inverse_frequencies: fp32 ``[head_dim / 2]``, radians per position.
    """
    positions = torch.arange(max_positions, dtype=torch.float32, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rope(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rotates heads ``[T, heads, head_dim]`` to their positions (int32 ``[T]``), in the dtype of ``x``.

    Args:
        table: from ``rope_table``.
    """
    return rope_reference(x, table, positions)


def rope_reference(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    cos, sin = table[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
