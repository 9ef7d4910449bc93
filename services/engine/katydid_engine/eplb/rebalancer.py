"""Moves experts to where the load asks for them, between passes and without holding one up.

Every ``interval`` passes the ranks add up how often each expert was chosen. Then layer by layer, a little between two
passes: the placement of one layer is worked out, and what leaves a rank is gathered beside the next pass; when every
rank has done so, the weights that have to move are sent into buffers while passes go on; and when every rank has its
own, the next round swaps them in and changes the table, on all ranks before the same pass. A layer is moved whole or
not at all: whatever fails, each layer's table and weights agree, and where one rank has no room for a layer all leave
it as it is and try again an interval later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from katydid_engine.collectives import Collectives, Pending
from katydid_engine.eplb.balance import imbalance, place_experts
from katydid_engine.eplb.moves import Move, keep_in_place, moves_between
from katydid_engine.layers.expert_table import ExpertTable

__all__ = ["BalanceState", "MovableExperts", "Rebalancer"]

_KEPT = 0.5
_WORTH = 1.02
_FAILED, _PREPARED, _ARRIVED = -1, 1, 2


class MovableExperts(Protocol):
    """A layer whose experts can move."""

    table: ExpertTable

    @property
    def slots(self) -> tuple[Tensor, ...]:
        """Tensors with a row for each of this rank's slots."""
        ...


@dataclass(frozen=True, slots=True)
class BalanceState:
    """What is known of the balance.

    Attributes:
        layers_moved, layers: of the rebalancing that is under way; equal when none is.
        finished, abandoned: rebalancings that moved something, and that had to be given up, since the start.
        placed_at: when the last one came to its end, whether or not anything had to move; None before.
        imbalance: load of the busiest rank over the mean, averaged over layers, as it was before the last one.
    """

    layers_moved: int = 0
    layers: int = 0
    finished: int = 0
    abandoned: int = 0
    placed_at: float | None = None
    imbalance: float = 1.0


class Rebalancer:
    """One rank's end; a ``lockstep.Between``.

    Args:
        layers: in the same order on every rank.
        group: the ranks that hold the experts, for nothing but moving them.
        interval: passes between the beginnings of two rebalancings.
        tell: hears of every change.
    """

    def __init__(
        self,
        layers: Sequence[MovableExperts],
        group: Collectives,
        *,
        interval: int,
        clock: Callable[[], float] = time.time,
        tell: Callable[[BalanceState], None] = lambda _: None,
    ) -> None:
        self._layers = layers
        self._group = group
        self._interval = interval
        self._clock = clock
        self._tell = tell
        self._window = np.zeros((len(layers), len(layers[0].table.chosen)))
        self._passes = 0
        self._next = len(layers)
        self._staged: _Staged | None = None
        self._failed = self._moved = False
        self._finished = self._abandoned = 0
        self._placed_at: float | None = None
        self._ratios: list[float] = []
        self._imbalance = 1.0
        device = layers[0].table.device
        # What is gathered takes turns with a pass instead of standing before it.
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def connect(self) -> None:
        """For all ranks together before there are requests: the first sum and the first message between two ranks
        connect them, which takes longer than a pass may wait."""
        nothing = self._layers[0].table.chosen.new_zeros(self._group.size, 1)
        self._group.all_to_all(self._group.all_reduce(nothing)).wait()

    @property
    def state(self) -> BalanceState:
        return BalanceState(
            self._next, len(self._layers), self._finished, self._abandoned, self._placed_at, self._imbalance
        )

    def progress(self) -> int:
        """0: a layer's weights are under way, or no layer is chosen; 1: they can be sent; 2: all are there; -1: there
        is no room."""
        if self._failed:
            return _FAILED
        if self._staged is None:
            return 0
        if not self._staged.started:
            return _PREPARED if self._staged.gathered else 0
        return _ARRIVED if self._staged.complete else 0

    def agreed(self, progress: list[int], *, passing: bool) -> None:
        """Sends or swaps in the layer that all ranks are ready for, gives up where one has no room, or begins."""
        if self._next < len(self._layers):
            if _FAILED in progress:
                self._abandon()
            elif self._staged is None:
                self._stage()
            elif set(progress) == {_PREPARED}:
                self._staged.start()
                return
            elif set(progress) == {_ARRIVED}:
                self._swap()
            else:
                return
            self._tell(self.state)
            return
        self._passes += passing
        if self._passes >= self._interval:
            self._passes = 0
            self._begin()
            self._tell(self.state)

    def _begin(self) -> None:
        counts = torch.stack([layer.table.chosen for layer in self._layers])
        torch._foreach_zero_([layer.table.chosen for layer in self._layers])
        recent = self._group.all_reduce(counts).cpu().numpy().astype(np.float64)
        self._window = _KEPT * self._window + recent
        self._ratios = []
        self._moved = False
        self._next = 0

    def _stage(self) -> None:
        """Prepares the next layer, or passes over it where it is well as it is."""
        layer = self._layers[self._next]
        held = layer.table.held
        loads, ranks = self._window[self._next], self._group.size
        wanted = place_experts(loads, len(held), ranks)
        self._ratios.append(imbalance(loads, np.array(held), ranks))
        if self._ratios[-1] <= _WORTH * imbalance(loads, wanted, ranks):
            self._go_on()
            return
        placed = keep_in_place(held, wanted.tolist(), ranks)
        moves = moves_between(held, placed, ranks)
        try:
            self._staged = _Staged(layer, placed, moves, self._group, self._beside)
        except RuntimeError:
            # No memory for the buffers; the others learn it in the next round.
            self._failed = True

    def _swap(self) -> None:
        assert self._staged is not None
        self._staged.swap()
        self._staged = None
        self._moved = True
        self._go_on()

    def _go_on(self) -> None:
        self._next += 1
        if self._next == len(self._layers):
            self._finished += self._moved
            self._placed_at = self._clock()
            self._imbalance = float(np.mean(self._ratios))

    def _abandon(self) -> None:
        self._staged = None
        self._failed = False
        self._abandoned += 1
        self._next = len(self._layers)


class _Staged:
    """One layer's weights on their way into buffers.

    Args:
        beside: the stream that gathers what is sent; None on a CPU.
    """

    def __init__(
        self,
        layer: MovableExperts,
        placed: list[int],
        moves: Sequence[Move],
        group: Collectives,
        beside: torch.cuda.Stream | None,
    ) -> None:
        self._layer = layer
        self._placed = placed
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
        targets = [move.target - first for move in incoming]
        sources = [move.source - first for move in outgoing]
        send = _per_rank([move.target // each for move in outgoing], group.size)
        receive = _per_rank([move.source // each for move in incoming], group.size)
        self._counts = send, receive
        slots = [_rows(tensor) for tensor in layer.slots]
        self._outgoing = [rows.new_empty((len(sources), rows.shape[1])) for rows in slots]
        self._incoming = [rows.new_empty((len(targets), rows.shape[1])) for rows in slots]
        self._gathered: torch.cuda.Event | None = None
        # One launch each: a copy, or an index, of its own for every slot would keep the host longer.
        own = [rows.unbind() for rows in slots]
        self._changing = [rows[target] for rows in own for target in targets]
        leaving = [rows[source] for rows in own for source in sources]
        if beside is None:
            _copy(self._outgoing, leaving)
        else:
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                _copy(self._outgoing, leaving)
                self._gathered = beside.record_event()
            for rows in self._outgoing:
                rows.record_stream(beside)
        self._under_way: list[Pending] = []

    @property
    def gathered(self) -> bool:
        return self._gathered is None or bool(self._gathered.query())  # type: ignore[no-untyped-call]

    @property
    def started(self) -> bool:
        return bool(self._under_way)

    @property
    def complete(self) -> bool:
        return all(rows.done() for rows in self._under_way)

    def start(self) -> None:
        self._under_way = [
            self._group.all_to_all(rows, *self._counts, out=buffer)
            for rows, buffer in zip(self._outgoing, self._incoming, strict=True)
        ]

    def swap(self) -> None:
        arrived = [rows.wait() for rows in self._under_way]
        if self._changing:
            torch._foreach_copy_(self._changing, [row for rows in arrived for row in rows.unbind()])
        self._layer.table.place(self._placed)


def _copy(to: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    if rows:
        torch._foreach_copy_([row for tensor in to for row in tensor.unbind()], list(rows))


def _rows(tensor: Tensor) -> Tensor:
    """Its bytes, a row for each slot, in elements of eight where they are as many: copied so a GPU is not held up."""
    rows = tensor.view(len(tensor), -1).view(torch.uint8)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows


def _per_rank(ranks: Sequence[int], size: int) -> list[int]:
    return [ranks.count(rank) for rank in range(size)]
