"""Pipeline stages: each holds some layers, and micro-batches of a step pass through them one after the other.

    stage 0          embedding, its layers, draft layers, head
    stages 1 ..      their layers; the last one also the final norm

The last stage sends its hidden states back to stage 0, which has the head and the scheduler: to the runner a pipeline
is a model like any other, and the other stages carry out the same plans without sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Link", "Stage", "TorchLink"]


class Link(Protocol):
    """Sends tensors from stage to stage; what two stages send each other arrives in order."""

    def send(self, x: Tensor, stage: int) -> None:
        """Returns at once; ``x`` must not change before ``flush``."""
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, stage: int) -> Tensor: ...

    def flush(self) -> None:
        """Waits until what was sent may change."""
        ...


class TorchLink:
    """Over ``torch.distributed``.

    Args:
        ranks: the world rank of each stage that has this rank's place in its TP group.
        group: of these ranks; its timeout says how long one waits for another.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
        self._ranks = tuple(ranks)
        self._group = group
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, x: Tensor, stage: int) -> None:
        x = x.contiguous()
        work = dist.isend(x, self._ranks[stage], group=self._group)
        assert work is not None
        self._sent.append((work, x))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, stage: int) -> Tensor:
        x = torch.empty(tuple(shape), dtype=dtype, device=device)
        dist.recv(x, self._ranks[stage], group=self._group)
        return x

    def flush(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


class Stage:
    """One stage of ``count``; ``link`` is None where there is only one."""

    def __init__(self, index: int = 0, count: int = 1, link: Link | None = None) -> None:
        self.index = index
        self.count = count
        self.link = link

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Its part of the model's layers; the first ones have one more where they do not divide."""
        each, more = divmod(num_layers, self.count)
        start = self.index * each + min(self.index, more)
        return range(start, start + each + (self.index < more))
