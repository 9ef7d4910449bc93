"""Whose bytes a tier holds: tenants with quotas have pools of their own, all others share one.

A pool may borrow what others leave free, up to its limit. When room is needed, pools give back what they hold beyond
their guarantee; below it a pool's blocks go for its own new ones alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["COMMON", "Pools", "Quota", "TierPolicy"]

COMMON = b""
"""The pool of tenants without a quota, and of blocks that are nobody's."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Bytes of a tier that are a tenant's before anyone else's, and the most it may have (0: what others leave)."""

    guaranteed_bytes: int = 0
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """How one tier is run. `quotas` by 16-byte tenant id; `each` is the quota of every tenant not named there."""

    eviction: str = "lru"
    admission: str = "adaptive"
    quotas: Mapping[bytes, Quota] = field(default_factory=dict)
    each: Quota | None = None


class Pools:
    """Bytes in use by pool and by tenant, against the quotas of `policy`."""

    def __init__(self, policy: TierPolicy) -> None:
        self._quotas = policy.quotas
        self._each = policy.each
        self.single = not policy.quotas and policy.each is None
        self._used: Counter[bytes] = Counter()
        self.held: Counter[bytes] = Counter()

    def pool(self, tenant: bytes) -> bytes:
        """The pool of a tenant."""
        if self.single or not tenant:
            return COMMON
        return tenant if self._each is not None or tenant in self._quotas else COMMON

    def quota(self, tenant: bytes) -> Quota:
        """What a tenant may have."""
        if self.pool(tenant) == COMMON:
            return Quota()
        return self._quotas.get(tenant) or self._each or Quota()

    def charge(self, tenant: bytes, size: int) -> None:
        """`size` bytes more (or less) are the tenant's."""
        for counter, key in ((self._used, self.pool(tenant)), (self.held, tenant)):
            counter[key] += size
            if not counter[key]:
                del counter[key]

    def used(self, tenant: bytes) -> int:
        """Bytes held by the pool of a tenant."""
        return self._used[self.pool(tenant)]

    def at_limit(self, tenant: bytes, size: int) -> bool:
        """Whether `size` bytes more would be more than the tenant may have."""
        limit = self.quota(tenant).limit_bytes
        return 0 < limit < self.used(tenant) + size

    def spares(self, pool: bytes, size: int) -> bool:
        """Whether a pool holds `size` bytes that are not guaranteed to it."""
        return self._used[pool] - size >= self.quota(pool).guaranteed_bytes

    def donors(self, size: int) -> list[bytes]:
        """Pools that `size` bytes may be taken from for whoever needs them, in no order."""
        if self.single:
            return [COMMON]
        return [pool for pool in self._used if self.spares(pool, size)]
