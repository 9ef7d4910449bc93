"""Requests in flight, of all and of each tenant: a place is taken before a body is read, and given back at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from katydid_runtime.errors import KatydidError, OverloadedError, QuotaExceededError

__all__ = ["Places"]


class Places:
    """`most` places, of which one tenant may have `of_tenant(tenant)` (None: all); `on_refused` hears of refusals."""

    def __init__(
        self, most: int, of_tenant: Callable[[str], int | None], on_refused: Callable[[KatydidError], object]
    ) -> None:
        self._most = most
        self._of_tenant = of_tenant
        self._on_refused = on_refused
        self._taken: dict[str, int] = {}
        self.in_use = 0

    def of(self, tenant: str) -> int:
        """Places that the tenant has now."""
        return self._taken.get(tenant, 0)

    @contextmanager
    def one(self, tenant: str) -> Iterator[None]:
        """Raises OverloadedError when all are taken, QuotaExceededError when the tenant has its share."""
        self._check_room(1)
        own, limit = self.of(tenant), self._of_tenant(tenant)
        if limit is not None and own >= limit:
            error = QuotaExceededError(
                f"{own} requests of tenant {tenant} are in flight, the most it may have",
                field="concurrency",
                value=own,
                allowed=f"at most {limit} at a time",
                retry_after_s=1.0,
            )
            self._on_refused(error)
            raise error
        self.in_use += 1
        self._taken[tenant] = own + 1
        try:
            yield
        finally:
            self.in_use -= 1
            if (left := self._taken[tenant] - 1) > 0:
                self._taken[tenant] = left
            else:
                del self._taken[tenant]

    @contextmanager
    def more(self, count: int) -> Iterator[None]:
        """So many for a request that has one already. Raises OverloadedError."""
        self._check_room(count)
        self.in_use += count
        try:
            yield
        finally:
            self.in_use -= count

    def _check_room(self, count: int) -> None:
        if self.in_use + count > self._most:
            error = OverloadedError(
                f"{self.in_use} requests are in flight; this gateway takes {self._most}", retry_after_s=1.0
            )
            self._on_refused(error)
            raise error
