"""The seam between layers and the ranks that share them: three ways to answer the same four questions."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Collectives", "ShapeOnly", "SingleRank", "TorchCollectives"]


class Collectives(Protocol):
    """One group of ranks. Every method is called by all ranks of the group in the same order, with equal shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks; same shape on each. May reuse ``x``'s memory."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenation over ranks along ``dim``, in rank order."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum over ranks, of which each keeps its ``1/size`` of dimension 0 (which ``size`` must divide)."""
        ...


class SingleRank:
    """A group of one: nothing moves."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:  # noqa: ARG002
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x


class TorchCollectives:
    """A ``torch.distributed`` group: gloo on CPU, NCCL on GPUs."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        parts = list(x.contiguous().chunk(self.size))
        out = torch.empty_like(parts[0])
        dist.reduce_scatter(out, parts, group=self._group)
        return out


class ShapeOnly:
    """Stands in for the other ranks of a plan when one rank runs alone: results have the right shape, not the right
    values, and nothing is sent. For timing a rank slice."""

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank}: expected 0 <= rank < size={size}")
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.size, dim=dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.chunk(self.size)[self.rank]
