"""Requests that wait for an engine, served by class and within a class by weighted fair queueing.

Fairness is start-time fair queueing (Goyal, Vin and Cheng, 1996): a request starts at the later of the class's virtual
time and its tenant's last virtual finish, and finishes after cost / weight; the smallest start goes first. A tenant
that floods the queue delays itself alone. A request that has waited its class's patience counts as one class higher, so
nothing starves. Of a full queue the longest is cut (McKenney, Stochastic Fairness Queueing, 1990), so that a flood does
not keep others out either. Pure: time is passed in.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = ["FairQueue", "PriorityClass", "Ticket", "class_of"]


class PriorityClass(IntEnum):
    """Served in this order."""

    URGENT = 0
    NORMAL = 1
    LOW = 2
    BULK = 3


PATIENCE_S = {PriorityClass.NORMAL: 10.0, PriorityClass.LOW: 30.0, PriorityClass.BULK: 120.0}
"""Seconds after which a waiting request moves up one class."""


def class_of(priority: int) -> PriorityClass:
    """The class of a priority in [-1000, 1000]: from 100 on urgent, from 0 normal, from -100 low, else bulk."""
    if priority >= 100:
        return PriorityClass.URGENT
    if priority >= 0:
        return PriorityClass.NORMAL
    return PriorityClass.LOW if priority >= -100 else PriorityClass.BULK


@dataclass(eq=False, slots=True)
class Ticket:
    """A waiting request: whose it is, what it costs in uncached prompt tokens, and since when it waits (seconds)."""

    tenant: str
    cost: int
    priority: PriorityClass
    since: float
    weight: float = 1.0
    level: PriorityClass = field(init=False)
    gone: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.level = self.priority


class _Class:
    """The tickets of one class; those that left or moved are skipped when their turn comes."""

    def __init__(self) -> None:
        self.tickets: list[tuple[float, int, Ticket]] = []
        self._virtual = 0.0
        self._finish: dict[str, float] = {}

    def push(self, ticket: Ticket, number: int) -> None:
        start = max(self._virtual, self._finish.get(ticket.tenant, 0.0))
        self._finish[ticket.tenant] = start + max(1, ticket.cost) / ticket.weight
        heapq.heappush(self.tickets, (start, number, ticket))

    def pop(self, level: PriorityClass) -> Ticket | None:
        while self.tickets:
            start, _, ticket = heapq.heappop(self.tickets)
            if not ticket.gone and ticket.level is level:
                self._virtual = start
                return ticket
        # Nobody waits: past service is no reason to put anyone behind a newcomer.
        self._virtual, self._finish = 0.0, {}
        return None


class FairQueue:
    """Waiting tickets. `len` counts them, `cost` sums their tokens."""

    def __init__(self) -> None:
        self._classes = {level: _Class() for level in PriorityClass}
        self._number = itertools.count()
        self._counts = dict.fromkeys(PriorityClass, 0)
        self._waiting: dict[Ticket, None] = {}
        self.cost = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Ticket]:
        """Waiting tickets, the longest wait first."""
        return iter(self._waiting)

    def waiting(self, level: PriorityClass) -> int:
        """Tickets of a class, by the class they came with."""
        return self._counts[level]

    def push(self, ticket: Ticket) -> None:
        self._waiting[ticket] = None
        self._counts[ticket.priority] += 1
        self.cost += ticket.cost
        self._classes[ticket.level].push(ticket, next(self._number))

    def remove(self, ticket: Ticket) -> None:
        """The request waits no more; harmless when it was served."""
        if self._waiting.pop(ticket, 0) is None:
            ticket.gone = True
            self._counts[ticket.priority] -= 1
            self.cost -= ticket.cost

    def pop(self, now: float) -> Ticket | None:
        """Whose turn it is at `now` seconds, None when nobody waits."""
        self._promote(now)
        for level in PriorityClass:
            ticket = self._classes[level].pop(level)
            if ticket is not None:
                self.remove(ticket)
                return ticket
        return None

    def displaced_by(self, newcomer: Ticket) -> Ticket | None:
        """Who leaves a full queue for `newcomer`, None when it is itself the one to be turned away.

        It is the last one of the least urgent class, of the tenant that has most waiting there for its weight.
        """
        lowest = max((ticket.level for ticket in self._waiting), default=newcomer.level)
        if lowest < newcomer.level:
            return None
        last: dict[str, Ticket] = {}
        waiting: Counter[str] = Counter()
        for ticket in self._waiting:
            if ticket.level is lowest:
                last.pop(ticket.tenant, None)
                last[ticket.tenant] = ticket
                waiting[ticket.tenant] += 1
        share = {tenant: waiting[tenant] / ticket.weight for tenant, ticket in last.items()}
        own = (waiting[newcomer.tenant] + 1) / newcomer.weight if lowest is newcomer.level else 0.0
        # Among equals the one that came last: it has waited least.
        longest = max(reversed(share), key=share.__getitem__, default=None)
        return last[longest] if longest is not None and share[longest] > own else None

    def ahead(self, ticket: Ticket) -> int:
        """Tokens that would be served before a ticket of its class, at most: those of its class and of higher ones."""
        return sum(other.cost for other in self._waiting if other.level <= ticket.level)

    def _promote(self, now: float) -> None:
        for ticket in self._waiting:
            if ticket.level is PriorityClass.URGENT:
                continue
            levels = range(ticket.level, ticket.priority + 1)
            if now - ticket.since >= sum(PATIENCE_S[PriorityClass(level)] for level in levels):
                ticket.level = PriorityClass(ticket.level - 1)
                self._classes[ticket.level].push(ticket, next(self._number))
