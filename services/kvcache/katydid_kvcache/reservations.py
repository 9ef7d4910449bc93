"""Reservations: slots that clients of this host are writing in place, by the attachment that took them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from katydid_runtime.errors import ConflictError

from katydid_kvcache.policy.lifetimes import SessionTerms
from katydid_kvcache.store import Write

__all__ = ["Reservation", "Reservations"]


class Reservation(NamedTuple):
    """Writes of `owner`, an attachment, in a session, to be committed before `ends_at` (monotonic seconds).

    Their blocks are kept for `hold_s` from the commit on.
    """

    owner: int
    writes: Sequence[Write]
    ends_at: float
    hold_s: float
    session: SessionTerms | None = None


class Reservations:
    """Writes by reservation; ids count from 1. The caller ends the writes it gets back."""

    def __init__(self) -> None:
        self._reservations: dict[int, Reservation] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._reservations)

    def add(
        self,
        owner: int,
        writes: Sequence[Write],
        ends_at: float,
        hold_s: float = 0.0,
        session: SessionTerms | None = None,
    ) -> int:
        """A new reservation of `owner`."""
        reservation = self._next
        self._next += 1
        self._reservations[reservation] = Reservation(owner, writes, ends_at, hold_s, session)
        return reservation

    def find(self, owner: int, reservation: int) -> Reservation:
        """The reservation. Raises ConflictError when `owner` has no such reservation (any more)."""
        found = self._reservations.get(reservation)
        if found is None or found.owner != owner:
            raise ConflictError(
                f"no reservation {reservation}",
                field="reservation",
                value=reservation,
                allowed="one of this attachment, neither committed nor ended yet",
            )
        return found

    def remove(self, reservation: int) -> None:
        del self._reservations[reservation]

    def drop_owner(self, owner: int) -> list[Write]:
        """End all reservations of an owner that is gone; their writes."""
        return self._end([number for number, held in self._reservations.items() if held.owner == owner])

    def expire(self, now: float) -> list[Write]:
        """End all reservations whose time is up; their writes."""
        return self._end([number for number, held in self._reservations.items() if held.ends_at <= now])

    def _end(self, reservations: Sequence[int]) -> list[Write]:
        return [write for number in reservations for write in self._reservations.pop(number).writes]
