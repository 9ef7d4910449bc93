"""One layer's experts on their way to other ranks: gathered into one message, received beside passes, swapped in.

Everything that takes the host or the device long is done beforehand, by the stream that is current then; the swap
itself is a wait and three launches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from katydid_engine.collectives import Collectives, Pending
from katydid_engine.eplb.moves import Move
from katydid_engine.layers.expert_table import ExpertTable

__all__ = ["MovableExperts", "StagedLayer"]

_ALIGNMENT = 16


class MovableExperts(Protocol):
    """A layer whose experts can move."""

    table: ExpertTable

    @property
    def slots(self) -> tuple[Tensor, ...]:
        """Tensors with a row for each of this rank's slots."""
        ...


class StagedLayer:
    """Of one rank.

    Args:
        placed: the expert of every slot of all ranks, when they have moved.

    Attributes:
        sends, swaps: whether all ranks are ready to send, or have what was sent to them.

    Raises:
        RuntimeError: there is no memory for it.
    """

    def __init__(self, layer: MovableExperts, placed: Sequence[int], moves: Sequence[Move], group: Collectives) -> None:
        self.sends = self.swaps = False
        self._layer = layer
        self._group = group
        each = len(placed) // group.size
        first = group.rank * each
        outgoing = sorted(
            (move for move in moves if move.source // each == group.rank),
            key=lambda move: (move.target // each, move.target),
        )
        incoming = sorted(
            (move for move in moves if move.target // each == group.rank),
            key=lambda move: (move.source // each, move.target),
        )
        self._counts = (
            _per_rank([move.target // each for move in outgoing], group.size),
            _per_rank([move.source // each for move in incoming], group.size),
        )
        self._placement = layer.table.placement(placed)
        slots = [_rows(tensor) for tensor in layer.slots]
        self._outgoing, leaving = _message(slots, len(outgoing))
        self._incoming, self._arriving = _message(slots, len(incoming))
        self._changing = _of_slots(slots, [move.target - first for move in incoming])
        if leaving:
            torch._foreach_copy_(leaving, _of_slots(slots, [move.source - first for move in outgoing]))
        self._gathered: torch.cuda.Event | None = None
        if self._outgoing.is_cuda:
            self._gathered = torch.cuda.current_stream().record_event()
        self._under_way: Pending | None = None

    @property
    def gathered(self) -> bool:
        """Whether all that leaves this rank has been copied."""
        return self._gathered is None or bool(self._gathered.query())  # type: ignore[no-untyped-call]

    @property
    def started(self) -> bool:
        return self._under_way is not None

    @property
    def complete(self) -> bool:
        """Whether all that comes to this rank is there."""
        return self._under_way is not None and self._under_way.done()

    def start(self) -> None:
        """Sends, behind what the current stream has gathered."""
        self._under_way = self._group.all_to_all(self._outgoing, *self._counts, out=self._incoming)

    def swap(self) -> None:
        """By the stream of the passes: behind those that it was given before."""
        assert self._under_way is not None
        self._under_way.wait()
        if self._changing:
            torch._foreach_copy_(self._changing, self._arriving)
        if self._incoming.is_cuda:
            # The memory is another stream's, which may take it again when this is forgotten.
            self._incoming.record_stream(torch.cuda.current_stream())
        self._layer.table.take(self._placement)


def _message(slots: Sequence[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
    """Room for ``count`` experts, ``[count, bytes]``, and in it each tensor's row of each expert, tensor by tensor."""
    sizes = [rows.shape[1] * rows.itemsize for rows in slots]
    ends = list(itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    room = torch.empty((count, ends[-1]), dtype=torch.uint8, device=slots[0].device)
    begins = [0, *ends[:-1]]
    parts = [
        row.view(rows.dtype)
        for rows, size, begin in zip(slots, sizes, begins, strict=True)
        for row in room[:, begin : begin + size].unbind()
    ]
    return room, parts


def _of_slots(slots: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    return [rows[number] for rows in (tensor.unbind() for tensor in slots) for number in numbers]


def _rows(tensor: Tensor) -> Tensor:
    """Its bytes, a row for each slot, in elements of eight where they are as many: copied so a GPU is not held up."""
    rows = tensor.view(len(tensor), -1).view(torch.uint8)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows


def _per_rank(ranks: Sequence[int], size: int) -> list[int]:
    return [ranks.count(rank) for rank in range(size)]
