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

    Or of blocks, of a row by 128 columns in activations and 128 x 128 in weights: up ``[E, 2 * I / 128, H / 128]``
    (gate's, then up's), down ``[E, H / 128, I / 128]``, token ``[T, H / 128]``; h is then quantised by its own largest
    values and inverse_h one. I and H are multiples of 128.
    """

    up: Tensor
    down: Tensor
    inverse_h: Tensor
    token: Tensor | None = None

    @property
    def of_blocks(self) -> bool:
        return self.up.ndim == 3

    def check_blocks(self, tokens: int, experts: int, hidden: int, width: int) -> None:
        """Raises ValueError unless scales of blocks fit these sizes."""
        if hidden % 128 or width % 128:
            raise ValueError(f"scales of blocks need hidden and n to be multiples of 128, got {hidden} and {width}")
        expected = {
            "up": (self.up, (experts, 2 * width // 128, hidden // 128)),
            "down": (self.down, (experts, hidden // 128, width // 128)),
            "token": (self.token, (tokens, hidden // 128)),
        }
        for name, (scale, shape) in expected.items():
            if scale is None or scale.shape != shape or scale.dtype != torch.float32 or not scale.is_contiguous():
                found = None if scale is None else f"{scale.dtype} {list(scale.shape)}"
                raise ValueError(f"scales.{name} must be fp32 {list(shape)}, contiguous, got {found}")

    @staticmethod
    def ones(experts: int, device: torch.device) -> ExpertScales:
        """For weights and activations that are not quantised."""
        one = torch.ones(experts, 2, device=device)
        return ExpertScales(one, one[:, 0].contiguous(), one[0, :1].contiguous())
