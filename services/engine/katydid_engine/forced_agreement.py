"""Samples that agree with a share of drafts, whatever the model says: to time steps with weights that predict nothing.

What is drawn was drawn before, so that a step pays for four small launches and no generator. Of every 20 steps the
share is exact, in an order of its own for each row and place.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ForcedAgreement"]

_BLOCKS, _STEPS = 800, 20


class ForcedAgreement:
    """For steps of up to ``rows`` rows with up to ``depth`` drafts, of which a ``share`` agrees."""

    def __init__(self, share: float, rows: int, depth: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        order = torch.rand(_BLOCKS, _STEPS, rows, depth, generator=generator).argsort(1)
        differs = (order >= round(share * _STEPS)).flatten(0, 1)
        self._differs = differs.to(device=device, dtype=torch.int32)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)

    def sample(self, drafts: Tensor, tokens: Tensor) -> None:
        """Writes into samples ``tokens[R, D + 1]``, at each of int32 ``drafts[R, D]`` it, or the token beside it."""
        rows, depth = drafts.shape
        self._turn.add_(1).remainder_(len(self._differs))
        differs = self._differs.index_select(0, self._turn)[0, :rows, :depth]
        torch.bitwise_xor(drafts, differs, out=tokens[:, :-1])
