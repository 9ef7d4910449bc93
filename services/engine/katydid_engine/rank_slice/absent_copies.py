"""Copies to GPUs that are not there: what is sent is counted, and takes its time where a link is emulated.

What would arrive lies there from the first time on: this rank's rows stand for the others'.
"""

from __future__ import annotations

import torch
from katydid_kernels.peer_reduce import PARTS, PeerMemory
from torch import Tensor

from katydid_engine.layers.part_copies import PartCopies
from katydid_engine.rank_slice.absent_ranks import AbsentRanks
from katydid_engine.rank_slice.emulated_link import EmulatedLink

__all__ = ["AbsentCopies"]


class AbsentCopies(PartCopies):
    """Of the group ``ranks``; arguments else as of `PartCopies`."""

    def __init__(
        self,
        ranks: AbsentRanks,
        hidden: int,
        *,
        tokens: int,
        told: int,
        device: torch.device,
        link: EmulatedLink | None,
    ) -> None:
        size = self.nbytes(ranks.size, hidden, tokens=tokens, told=told)
        own = torch.zeros(size, dtype=torch.uint8, device=device)
        memory = PeerMemory(ranks.rank, (own,) * ranks.size, torch.zeros(ranks.size, dtype=torch.int64, device=device))
        super().__init__(memory, hidden, tokens=tokens, told=told)
        self._ranks, self._link = ranks, link
        self._left = {
            (kind, part): torch.cuda.Event()  # type: ignore[no-untyped-call]
            for kind in ("scatter", "gather")
            for part in range(PARTS)
        }
        self._filled: set[tuple[str, int, int]] = set()

    def sum(self, part: int, x: Tensor, residual: Tensor, weight: Tensor, eps: float, own: Tensor) -> Tensor:
        if self._first("sum", part, len(x)):
            share = -(-len(x) // self.memory.size)
            for source in range(self.memory.size):
                there = slice(source * self._share, source * self._share + share)
                for room, kept, width in (
                    ("summands", "outgoing", self.hidden),
                    ("summand scales", "outgoing scales", 4),
                ):
                    rows = self._bytes(kept, part, width)[:share]
                    self._bytes(room, part, width)[there][: len(rows)].copy_(rows)
        return super().sum(part, x, residual, weight, eps, own)

    def gather(self, part: int, tokens: int, told: Tensor | None = None) -> None:
        super().gather(part, tokens, told)
        if self._first("gather" if told is None else "gather, told", part, tokens):
            share = -(-tokens // self.memory.size)
            mine = slice(self.memory.rank * share, (self.memory.rank + 1) * share)
            columns = 0 if told is None else told.shape[1]
            for rows in super().gathered(part, tokens, columns):
                own = rows[mine].clone()
                for first in range(0, tokens, share):
                    rows[first : first + share].copy_(own[: len(rows[first : first + share])])

    def _copy(self, peer: int, name: str, part: int, first: int, values: Tensor) -> None:
        if peer == self.memory.rank:
            super()._copy(peer, name, part, first, values)
            return
        self._ranks.count("peers copied", values.nbytes)
        if self._link is not None:
            self._link.carry(values.nbytes)

    def _raise(self, peer: int, kind: str, part: int) -> None:  # noqa: ARG002
        self._left[kind, part].record()

    def _await(self, kind: str, part: int) -> None:
        torch.cuda.current_stream().wait_event(self._left[kind, part])

    def _first(self, what: str, part: int, tokens: int) -> bool:
        key = (what, part, tokens)
        fresh = key not in self._filled
        self._filled.add(key)
        return fresh

    def _bytes(self, name: str, part: int, width: int) -> Tensor:
        """A room, a row for each of its rows."""
        begin = self._offsets[f"{name} {part}"]
        rows = self.memory.size * self._share if name.startswith("summand") else self.tokens
        return self.memory.own[begin : begin + rows * width].view(rows, width)
