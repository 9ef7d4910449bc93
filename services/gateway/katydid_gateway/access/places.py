"""Requests in flight, of all and of each tenant: a place is taken before a body is read, and given back at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from katydid_runtime.errors import OverloadedError, QuotaExceededError

__all__ = ["Places"]


class Places:
    """`most` places, of which one tenant may have `of_tenant(tenant)` (None: all)."""

    def __init__(self, most: int, of_tenant: Callable[[str], int | None]) -> None:
        self._most = most
        self._of_tenant = of_tenant
        self._taken: dict[str, int] = {}
        self.in_use = 0

    def of(self, tenant: str) -> int:
        """Places that the tenant has now."""
        return self._taken.get(tenant, 0)

    @contextmanager
    def one(self, tenant: str) -> Iterator[None]:
        """Raises OverloadedError when all are taken, QuotaExceededError when the tenant has its share."""
        if self.in_use >= self._most:
            raise OverloadedError(
                f"{self.in_use} requests are in flight, the most this gateway takes", retry_after_s=1.0
            )
        own, limit = self.of(tenant), self._of_tenant(tenant)
        if limit is not None and own >= limit:
            raise QuotaExceededError(
                f"{own} requests of tenant {tenant} are in flight, the most it may have",
                field="concurrency",
                value=own,
                allowed=f"at most {limit} at a time",
                retry_after_s=1.0,
            )
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
