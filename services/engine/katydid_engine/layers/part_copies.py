"""Copies of a part's rows beside kernels that hold every multiprocessor to their end.

What is sent beside such a kernel, and needs some multiprocessors on its way, must have had them before:

* summands are quantised by the stream that computes, in front of its next product, and leave beside that;
* before attention that stream waits until the other part's sums are made and their rows on the way;
* a copy within a GPU needs multiprocessors, one to another GPU does not: a rank's own rows are gathered last.
"""

from __future__ import annotations

from typing import Any

import torch
from katydid_kernels import quantize_fp8
from katydid_kernels.peer_reduce import PeerCopies
from torch import Tensor

__all__ = ["PartCopies"]


class PartCopies(PeerCopies):
    """As `PeerCopies`, which says what its calls take and give, but for ``quantize`` in front of ``scatter``."""

    def __init__(self, *arguments: Any, **sizes: Any) -> None:
        super().__init__(*arguments, **sizes)
        self._leaving: dict[int, torch.cuda.Event] = {}

    def quantize(self, part: int, x: Tensor) -> None:
        """Makes summands ready for the way, by the present stream, which has gathered the part's rows before: so
        nothing of what lay there is still to be sent. ``x`` as of ``scatter``, which must follow."""
        quantize_fp8(x, out=(self._rows("outgoing", part, len(x)), self._scales("outgoing scales", part, len(x))))

    def scatter(self, part: int, x: Tensor) -> None:
        tokens, size, rank = len(x), self.memory.size, self.memory.rank
        share = -(-tokens // size)
        values, scales = self._rows("outgoing", part, tokens), self._scales("outgoing scales", part, tokens)
        for step in range(1, size):
            peer = (rank + step) % size
            first, last = peer * share, min((peer + 1) * share, tokens)
            if first < last:
                self._copy(peer, "summands", part, rank * self._share, values[first:last])
                self._copy(peer, "summand scales", part, rank * self._share, scales[first:last])
            self._raise(peer, "scatter", part)

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
