"""Leases: promises to a client that blocks stay until it releases them, its time is up, or it is gone.

A lease belongs to an owner (an attachment); when the owner goes, all its leases go. The table only keeps the books: the
caller pins what it grants and unpins what it gets back.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["LeaseTable"]

Item = TypeVar("Item")


class _Lease(NamedTuple, Generic[Item]):
    owner: int
    items: Sequence[Item]
    expires_at: float


class LeaseTable(Generic[Item]):
    """Leases by id; ids count from 1. Times are in seconds of one monotonic clock of the caller's choice."""

    def __init__(self) -> None:
        self._leases: dict[int, _Lease[Item]] = {}
        self._by_owner: dict[int, set[int]] = {}
        self._expiry: list[tuple[float, int]] = []
        self._next = 1

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, owner: int, items: Sequence[Item], expires_at: float) -> int:
        """A new lease of `owner` over `items`."""
        lease = self._next
        self._next += 1
        self._leases[lease] = _Lease(owner, items, expires_at)
        self._by_owner.setdefault(owner, set()).add(lease)
        heapq.heappush(self._expiry, (expires_at, lease))
        return lease

    def valid(self, owner: int, lease: int) -> bool:
        """Whether `owner` holds that lease now."""
        return lease in self._by_owner.get(owner, ())

    def release(self, owner: int, lease: int) -> Sequence[Item]:
        """End a lease of `owner`; its items, or none when it is not (or no longer) the owner's."""
        return self._end(lease) if self.valid(owner, lease) else ()

    def drop_owner(self, owner: int) -> list[Item]:
        """End all leases of an owner that is gone; their items, one for each lease that had them."""
        return [item for lease in sorted(self._by_owner.get(owner, ())) for item in self._end(lease)]

    def expire(self, now: float) -> list[Item]:
        """End all leases whose time is up; their items."""
        items: list[Item] = []
        while self._expiry and self._expiry[0][0] <= now:
            lease = heapq.heappop(self._expiry)[1]
            if lease in self._leases:
                items.extend(self._end(lease))
        return items

    def check_integrity(self) -> None:
        """Raises AssertionError when the books don't balance."""
        by_owner = {lease for leases in self._by_owner.values() for lease in leases}
        assert by_owner == set(self._leases), "a lease has no owner, or an owner a lease that ended"
        assert all(self._by_owner.values()), "an owner without leases is kept"
        assert set(self._leases) <= {lease for _, lease in self._expiry}, "a lease never ends"

    def _end(self, lease: int) -> Sequence[Item]:
        record = self._leases.pop(lease)
        of_owner = self._by_owner[record.owner]
        of_owner.discard(lease)
        if not of_owner:
            del self._by_owner[record.owner]
        # Ended leases leave their heap entry behind; sweep when most of the heap is such.
        if len(self._expiry) > 64 and len(self._expiry) > 2 * len(self._leases):
            self._expiry = [entry for entry in self._expiry if entry[1] in self._leases]
            heapq.heapify(self._expiry)
        return record.items
