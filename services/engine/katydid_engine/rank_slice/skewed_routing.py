"""Selection biases that make a synthetic router as uneven as a trained one.

``SHARES`` are hy3-tiny's: how often each of its sixteen experts is chosen on this repository's own text, over an even
share, busiest first, mean over its sparse layers. They are stretched over as many experts as a layer has.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

__all__ = ["SHARES", "SkewedRouting", "expert_shares"]

SHARES = (1.53, 1.40, 1.34, 1.22, 1.14, 1.06, 0.99, 0.96, 0.92, 0.89, 0.87, 0.81, 0.79, 0.75, 0.73, 0.60)
_SAMPLES = 8192
_ROUNDS = 60
_RATE = 0.15


def expert_shares(experts: int) -> Tensor:
    """fp32 ``[experts]``, busiest first, mean one."""
    known = torch.tensor(SHARES)
    places = (torch.arange(experts) + 0.5) * len(SHARES) / experts - 0.5
    below = places.floor().clamp(0, len(SHARES) - 2).long()
    shares = known[below] + (places - below) * (known[below + 1] - known[below])
    return shares / shares.mean()


class SkewedRouting:
    """Biases for routers whose logits are normal with ``deviation``; experts' order differs from layer to layer."""

    def __init__(self, top_k: int, deviation: float) -> None:
        self._top_k = top_k
        self._deviation = deviation
        self._biases: Tensor | None = None

    def __call__(self, name: str, experts: int) -> Tensor:
        """fp32 ``[experts]`` of the router's tensor ``name``."""
        if self._biases is None:
            self._biases = self._solve(experts)
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        return self._biases[order]

    def _solve(self, experts: int) -> Tensor:
        """By turns choose with the biases there are, and raise those of experts chosen too seldom."""
        generator = torch.Generator().manual_seed(11)
        scores = (torch.randn(_SAMPLES, experts, generator=generator) * self._deviation).sigmoid()
        wanted = expert_shares(experts)
        biases = torch.zeros(experts)
        for _ in range(_ROUNDS):
            chosen = (scores + biases).topk(self._top_k, dim=1).indices
            counts = torch.bincount(chosen.flatten(), minlength=experts).float()
            found = (counts / counts.mean()).clamp(min=0.01)
            biases += _RATE * (wanted / found).log() * 0.1
        return biases
