"""What turns the products of quantised experts back into values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ExpertScales"]


@dataclass(frozen=True)
class ExpertScales:
    """fp32 factors that turn quantised products into values; all ones for bf16.

    up: ``[E, 2]``, weight scale of gate and of up times the scale of x, unless that is per token.
    down: ``[E]``, weight scale times the scale of h.
    inverse_h: ``[1]``, one over the scale of h.
    token: ``[T]``, the scale of each row of x, or None.
    """

    up: Tensor
    down: Tensor
    inverse_h: Tensor
    token: Tensor | None = None

    @staticmethod
    def ones(experts: int, device: torch.device) -> ExpertScales:
        """For weights and activations that are not quantised."""
        one = torch.ones(experts, 2, device=device)
        return ExpertScales(one, one[:, 0].contiguous(), one[0, :1].contiguous())
