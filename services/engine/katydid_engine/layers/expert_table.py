"""Where each expert of a layer lies: from the model's ids to slots, and how often each was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from katydid_engine.host_copies import to_device

__all__ = ["ExpertTable", "Placement"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which expert each slot of all ranks holds, and what of it lies on the device.

    Attributes:
        slots: int32 ``[experts, copies + 1]``, of each expert.
        counts: int32 ``[experts]``, how many those are.
    """

    held: list[int]
    slots: Tensor
    counts: Tensor


class ExpertTable:
    """Experts in order and then copies of the first ones, until it is told otherwise.

    Attributes:
        chosen: int64 ``[experts]``, how often this rank's tokens chose each since ``chosen`` was last zeroed.
        held: the expert of each slot of all ranks.
    """

    def __init__(self, num_experts: int, copies: int, device: torch.device) -> None:
        self.device = device
        self.chosen = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.held: list[int] = [*range(num_experts), *(index % num_experts for index in range(copies))]
        # As wide as it can ever get: its address does not change, so that a captured graph reads the present table.
        self._slots = torch.zeros((num_experts, copies + 1), dtype=torch.int32, device=device)
        self._counts = torch.ones(num_experts, dtype=torch.int32, device=device)
        self._counting = copies > 0
        self.place(self.held)

    def place(self, held: Sequence[int]) -> None:
        """From now on slot ``i`` holds expert ``held[i]``; every expert must be held by one at least."""
        self.take(self.placement(held))

    def take(self, placement: Placement) -> None:
        """As ``place``, of what was worked out before."""
        self._slots.copy_(placement.slots)
        self._counts.copy_(placement.counts)
        self.held = placement.held

    def placement(self, held: Sequence[int]) -> Placement:
        """For ``take``, which then keeps the host for no longer than two launches."""
        counts = np.bincount(held, minlength=len(self._counts))
        by_expert, first = np.argsort(held, kind="stable"), np.cumsum(counts) - counts
        column = np.arange(self._slots.shape[1])
        # Empty columns repeat the first slot: they are never picked.
        rows = by_expert[first[:, None] + np.where(column < counts[:, None], column, 0)]
        slots, own = (to_device(torch.from_numpy(values.astype(np.int32)), self.device) for values in (rows, counts))
        return Placement(list(held), slots, own)

    def slots(self, ids: Tensor, num_rows: int, nowhere: int) -> Tensor:
        """int32 ``[T, top_k]`` of experts -> the same of slots; ``nowhere`` in rows from ``num_rows`` on.

        Copies of an expert take turns by row, so that each gets an equal part of its tokens.
        """
        if self._counting:
            real = ids[:num_rows].flatten().long()
            self.chosen.scatter_add_(0, real, torch.ones_like(real))
            turn = torch.arange(len(ids), device=ids.device, dtype=torch.int32).unsqueeze(1) % self._counts[ids.long()]
            found = self._slots.flatten()[ids.long() * self._slots.shape[1] + turn]
        else:
            found = ids.clone()
        found[num_rows:] = nowhere
        return found
