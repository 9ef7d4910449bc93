"""Muon: momentum whose matrix updates are orthogonalised by Newton-Schulz (K. Jordan et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Nearly orthogonal matrices with the singular vectors of g [batch, rows, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Steps a list of parameters seen as stacks of matrices.

    `views` pairs each parameter with its matrix stack shape (batch, rows, columns): the experts of one layer lie in one
    parameter but are separate matrices. Weight decay is decoupled.
    """

    def __init__(
        self,
        views: Sequence[tuple[Tensor, tuple[int, int, int]]],
        lr: float,
        momentum: float = 0.95,
        decay: float = 0.0,
    ) -> None:
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.groups: dict[tuple[int, int], list[tuple[Tensor, tuple[int, int, int]]]] = {}
        for parameter, shape in views:
            self.groups.setdefault(shape[1:], []).append((parameter, shape))
        self.state = {
            key: torch.zeros(sum(s[0] for _, s in members), *key, device=members[0][0].device)
            for key, members in self.groups.items()
        }

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at learning rate `lr * scale`."""
        for key, members in self.groups.items():
            grads = torch.cat([as_matrices(_gradient(p), s) for p, s in members])
            buffer = self.state[key]
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonalise(grads.lerp(buffer, self.momentum)).float()
            update *= max(1.0, key[0] / key[1]) ** 0.5
            offset = 0
            for p, s in members:
                if self.decay:
                    p.mul_(1 - self.lr * scale * self.decay)
                as_matrices(p, s).sub_(update[offset : offset + s[0]], alpha=self.lr * scale)
                offset += s[0]


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "a step comes after a backward pass through every parameter"
    return parameter.grad


def as_matrices(t: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A view of parameter t [r, c] as (batch, rows, columns): stacked by rows, or by columns when rows == r."""
    batch, rows, columns = shape
    if t.shape[0] == batch * rows:
        return t.view(shape)
    return t.view(rows, batch, columns).transpose(0, 1)
