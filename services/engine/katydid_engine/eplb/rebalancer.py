"""Moves experts to where the load asks for them, between passes and without holding one up.

Every ``interval`` passes the ranks add up how often each expert was chosen. Then layer by layer, while passes go on:
the placement of one layer is worked out, and what leaves a rank is gathered; when every rank has done so, it is sent
into buffers; and when every rank has its own, they are swapped in and the table changes, on all ranks behind the same
pass. All of that the host launches when it has launched a pass, and would wait for it. A layer is moved whole or not at
all: whatever fails, each layer's table and weights agree, and where one rank has no room for a layer all leave it as it
is and try again an interval later.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from katydid_engine.collectives import Collectives
from katydid_engine.eplb.balance import imbalance, place_experts
from katydid_engine.eplb.moves import keep_in_place, moves_between
from katydid_engine.eplb.staged_layer import MovableExperts, StagedLayer

__all__ = ["BalanceState", "Rebalancer"]

_KEPT = 0.5
_WORTH = 1.02
_FAILED, _PREPARED, _ARRIVED = -1, 1, 2


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
        self._staged: StagedLayer | None = None
        self._failed = self._moved = False
        self._finished = self._abandoned = 0
        self._placed_at: float | None = None
        self._ratios: list[float] = []
        self._imbalance = 1.0
        self._due = False
        device = layers[0].table.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def connect(self) -> None:
        """For all ranks together before there are requests: the first sum and the first message between two ranks
        connect them, and what is launched for the first time is loaded; both take longer than a pass may wait."""
        self._counted()
        nothing = self._layers[0].table.chosen.new_zeros(self._group.size, 1)
        self._group.all_to_all(nothing).wait()

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
        """Gives up where a rank has no room, or begins; what there is to do else is done ``meanwhile``."""
        if self._next < len(self._layers):
            self._due = True
            if _FAILED in progress:
                self._abandon()
                self._tell(self.state)
            elif self._staged is not None:
                self._staged.sends = set(progress) == {_PREPARED}
                self._staged.swaps = set(progress) == {_ARRIVED}
            return
        self._passes += passing
        if self._passes >= self._interval:
            self._passes = 0
            self._begin()
            self._tell(self.state)

    @torch.inference_mode()
    def meanwhile(self) -> None:
        """Once a round: works out a layer's placement and gathers what leaves this rank; sends it; or swaps in what has
        come, behind the pass that the current stream is about."""
        if not self._due or self._next == len(self._layers) or self._failed:
            return
        self._due = False
        if self._staged is None:
            self._stage()
        elif self._staged.sends:
            with self._beside():
                self._staged.start()
        elif self._staged.swaps:
            self._swap()
        else:
            return
        self._tell(self.state)

    def _beside(self) -> AbstractContextManager[object]:
        """What is launched within neither waits for a pass nor is waited for by one."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _begin(self) -> None:
        self._window = _KEPT * self._window + self._counted()
        self._ratios = []
        self._moved = False
        self._next, self._due = 0, True

    def _counted(self) -> NDArray[np.float64]:
        """How often each expert was chosen by all ranks' tokens since it was counted last, ``[layers, experts]``."""
        chosen = [layer.table.chosen for layer in self._layers]
        counts = self._group.all_reduce(torch.stack(chosen))
        torch._foreach_zero_(chosen)
        return counts.cpu().numpy().astype(np.float64)

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
            with self._beside():
                self._staged = StagedLayer(layer, placed, moves, self._group)
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
