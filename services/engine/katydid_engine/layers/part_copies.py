"""Copies of a part's rows beside kernels that hold every multiprocessor to their end.

A copy to another GPU needs no multiprocessor, one within a GPU does, and so do the sums between a part's two transfers.
So a rank's own rows are gathered behind all that leaves it, and who is about to hold the multiprocessors can wait until
the other parts need none of them before their rows are on the way.
"""

from __future__ import annotations

from typing import Any

import torch
from katydid_kernels.peer_reduce import PeerCopies
from torch import Tensor

__all__ = ["PartCopies"]


class PartCopies(PeerCopies):
    """As `PeerCopies`, which says what its calls take and give."""

    def __init__(self, *arguments: Any, **sizes: Any) -> None:
        super().__init__(*arguments, **sizes)
        self._leaving: dict[int, torch.cuda.Event] = {}

    def gather(self, part: int, tokens: int, told: Tensor | None = None) -> None:
        size, rank = self.memory.size, self.memory.rank
        share = -(-tokens // size)
        first = rank * share
        rows = min(share, max(0, tokens - first))
        parts = [
            ("gathered", self._rows("leaving", part, rows)),
            ("gathered scales", self._scales("leaving scales", part, rows)),
        ]
        if told is not None:
            parts.append(("gathered told", told[:rows].contiguous()))
        if self.memory.own.is_cuda:
            self._leaving[part] = torch.cuda.current_stream().record_event()
        for step in (*range(1, size), 0):
            peer = (rank + step) % size
            for name, values in parts if rows else ():
                self._copy(peer, name, part, first, values)
            self._raise(peer, "gather", part)

    def make_way(self, part: int) -> None:
        """The present stream, which computes ``part``, goes on when rows of the others are on the way to all."""
        for other, leaving in self._leaving.items():
            if other != part:
                torch.cuda.current_stream().wait_event(leaving)
