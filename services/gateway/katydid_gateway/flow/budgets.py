"""What each tenant may have computed: token buckets that fill by the second, charged before the work and settled after.

A request reserves the prompt tokens that routing expects to be computed, and is settled with those that were and with
its output; cached tokens cost nothing. An answer longer than its tenant can pay for puts the bucket into debt, which
the next request waits for. Pure: time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Budgets", "Reservation", "TenantTerms"]


@dataclass(frozen=True, slots=True)
class TenantTerms:
    """What a tenant was given: its share of busy engines, tokens a minute and requests at a time (None: any number)."""

    weight: float = 1.0
    tokens_per_minute: int | None = None
    concurrency: int | None = None


@dataclass(eq=False, slots=True)
class Reservation:
    """Tokens taken out of a tenant's bucket for one request."""

    tenant: str
    tokens: int
    settled: bool = False


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float


class Budgets:
    """All tenants' buckets. A bucket holds a minute's worth; a larger request may take a full one into debt."""

    def __init__(self, terms: Callable[[str], TenantTerms]) -> None:
        self._terms = terms
        self.reserved = 0
        self._buckets: dict[str, _Bucket] = {}

    def reserve(self, tenant: str, tokens: int, now: float) -> Reservation | float:
        """The reservation, or after how many seconds it can be had."""
        limit = self._terms(tenant).tokens_per_minute
        if limit is None:
            return Reservation(tenant, 0)
        bucket = self._filled(tenant, limit, now)
        missing = min(tokens, limit) - bucket.tokens
        if missing > 0:
            return missing * 60.0 / limit
        bucket.tokens -= tokens
        self.reserved += tokens
        return Reservation(tenant, tokens)

    def settle(self, reservation: Reservation, used: int, now: float) -> None:
        """The request has ended after `used` tokens; a second settlement changes nothing."""
        if reservation.settled:
            return
        reservation.settled = True
        self.reserved -= reservation.tokens
        limit = self._terms(reservation.tenant).tokens_per_minute
        if limit is not None:
            bucket = self._filled(reservation.tenant, limit, now)
            bucket.tokens = min(float(limit), bucket.tokens + reservation.tokens - used)

    def left(self, tenant: str, now: float) -> float | None:
        """Tokens in the tenant's bucket now; None without a limit."""
        limit = self._terms(tenant).tokens_per_minute
        return None if limit is None else self._filled(tenant, limit, now).tokens

    def _filled(self, tenant: str, limit: int, now: float) -> _Bucket:
        bucket = self._buckets.get(tenant)
        if bucket is None:
            bucket = self._buckets[tenant] = _Bucket(float(limit), now)
        bucket.tokens = min(float(limit), bucket.tokens + max(0.0, now - bucket.filled_at) * limit / 60.0)
        bucket.filled_at = max(bucket.filled_at, now)
        return bucket
