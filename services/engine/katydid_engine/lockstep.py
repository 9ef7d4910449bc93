"""Ranks that share experts forward together: before every pass they agree which one it is, and who has no tokens for it
takes part with nothing.

    idle        rank 0 of a group with nothing to compute: joins a round a few times a second, or at once after one in
                which somebody computed; what another rank has to compute waits for that at most
    a pass      of the target model, or of a draft layer. When ranks want different ones the lowest is first; the others
                take part in it, and ask again for theirs
    a step      a pass of the target with as many of the draft layer behind it, where all that want the target's mean
                the same number: one round for all of them, which graphs then carry out without the host

With its turn each rank learns how many rows the others have, so that all choose the same form of exchange, and how
many drafts the next step should make: the number that the rank with the most rows to sample would choose.

Other ranks of a TP group join exactly the rounds that their first rank joins: a plan tells them of a pass, an empty
record of an idle round. So no rank ever waits for one that does not come, and one that is lost ends the wait by the
group's timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from katydid_engine.collectives import Collectives

__all__ = ["Between", "Lockstep"]

_NOTHING = -1
_ACTIVE_S = 1.0
_WARM_PATIENCE_S = 0.001
_IDLE_PATIENCE_S = 0.02


class Between(Protocol):
    """Work of all ranks between two passes, such as moving experts."""

    def progress(self) -> int:
        """How far this rank is, in a number that the others are told."""
        ...

    def agreed(self, progress: list[int], *, passing: bool) -> None:
        """How far each rank is, and whether a pass follows; called on all ranks alike, with no pass running."""
        ...

    def meanwhile(self) -> None:
        """Whatever need not stand between two passes; called after ``agreed``, again and again, and before the next."""
        ...


class Lockstep:
    """One rank's end.

    Args:
        group: all ranks that pass together, on the CPU.
        take_part: what this rank owes the others in a pass for which it has no tokens: of its kind, the most rows
            that a rank has in it, and the passes of the draft layer behind it.
        between: None where nothing goes on between passes.

    Attributes:
        drafts: what all ranks should draft behind the rows of steps that are still to be planned; None before any has
            said what it would.
    """

    def __init__(
        self, group: Collectives, take_part: Callable[[int, int, int], None], between: Between | None = None
    ) -> None:
        self._group = group
        self._take_part = take_part
        self._between = between
        self._passed_at = -_ACTIVE_S
        self._passed = False
        self._sampled = self._wished = 0
        self.drafts: int | None = None

    def expect(self, sampled: int, drafts: int) -> None:
        """The step that is entered next samples so many rows, and this rank would have it draft so many tokens."""
        self._sampled, self._wished = sampled, drafts

    def enter(self, kind: int, rows: int, behind: int = 0) -> tuple[int, int]:
        """Returns when it is the turn of a pass of ``kind``, 0 for the target's, 1 + depth for a draft layer's: the
        most rows that a rank has in it, and ``behind``, or 0 where passes behind it are to be asked for one by one."""
        while True:
            turn, most, together = self._round(kind, rows, behind)
            if turn == kind:
                return most, together
            self._take_part(turn, most, together)
            self.meanwhile()

    def idle(self) -> None:
        """Joins a round with nothing to compute."""
        turn, most, together = self._round(_NOTHING, 0, 0)
        self._passed = turn != _NOTHING
        if self._passed:
            self._take_part(turn, most, together)
        self.meanwhile()

    def meanwhile(self) -> None:
        """For a host that has launched a pass, and would wait for it."""
        if self._between is not None:
            self._between.meanwhile()

    @property
    def patience_s(self) -> float:
        """How long a rank with nothing to compute may wait before it joins a round."""
        if self._passed:
            return 0.0
        return _WARM_PATIENCE_S if time.monotonic() - self._passed_at < _ACTIVE_S else _IDLE_PATIENCE_S

    def _round(self, wanted: int, rows: int, behind: int) -> tuple[int, int, int]:
        """The kind of the pass that comes now, -1 when nobody has anything to compute, the most rows in it, and the
        passes behind it."""
        self.meanwhile()
        progress = 0 if self._between is None else self._between.progress()
        sampled = 0 if wanted == _NOTHING else self._sampled
        own = torch.tensor([[wanted, progress, rows, behind, sampled, self._wished]])
        told = self._group.all_gather(own, 0).tolist()
        kinds = [kind for kind, *_ in told if kind != _NOTHING]
        if self._between is not None:
            self._between.agreed([progress for _, progress, *_ in told], passing=bool(kinds))
        if not kinds:
            return _NOTHING, 0, 0
        self._passed_at = time.monotonic()
        *_, sampled, drafts = max(told, key=lambda of_rank: of_rank[-2])
        if sampled:
            self.drafts = int(drafts)
        turn = min(kinds)
        of_turn = [(rows, behind) for kind, _, rows, behind, *_ in told if kind == turn]
        passes = {behind for _, behind in of_turn}
        return turn, max(rows for rows, _ in of_turn), passes.pop() if len(passes) == 1 else 0
