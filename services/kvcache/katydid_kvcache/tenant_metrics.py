"""Prometheus metrics by tenant: tokens and bytes found by tier, tokens missed, prefill time saved, bytes held."""

from __future__ import annotations

from typing import Any

from katydid_runtime.metrics import Metrics

from katydid_kvcache.cache import Cache

__all__ = ["TenantMetrics"]


class TenantMetrics:
    """Copies the figures of `Tenants`. A tenant shows as the hexadecimal digits of its id; "" is all others."""

    def __init__(self, metrics: Metrics) -> None:
        by_tier = ["tenant", "tier"]
        self._hit_tokens = metrics.counter("tenant_hit_tokens", "Tokens looked up and found in the tier", by_tier)
        self._hit_bytes = metrics.counter("tenant_hit_bytes", "Bytes of the blocks found in the tier", by_tier)
        self._held = metrics.gauge("tenant_held_bytes", "Bytes of the tier that hold the tenant's blocks", by_tier)
        self._missed = metrics.counter("tenant_missed_tokens", "Tokens looked up and found nowhere", ["tenant"])
        self._saved = metrics.counter(
            "tenant_saved_prefill_seconds", "Prefill time that the tokens found would have cost", ["tenant"]
        )
        self._refused = metrics.counter("tenant_refused_blocks", "Writes refused because of the quota", ["tenant"])
        self._shared = metrics.counter(
            "tenant_shared_hit_blocks", "Blocks found that another tenant had written", ["tenant"]
        )
        self._seen: dict[tuple[str, ...], float] = {}

    def update(self, cache: Cache) -> None:
        """Bring everything up to the figures."""
        held: dict[tuple[str, str], int] = {}
        for tenant, figures in cache.tenants:
            name = tenant.hex()
            for tier, tokens in figures.hit_tokens.items():
                self._follow(self._hit_tokens, (name, tier.name.lower()), tokens)
                self._follow(self._hit_bytes, (name, tier.name.lower()), figures.hit_bytes[tier])
            self._follow(self._missed, (name,), figures.missed_tokens)
            self._follow(self._saved, (name,), cache.tenants.saved_prefill_s(figures))
            self._follow(self._refused, (name,), figures.refused)
            self._follow(self._shared, (name,), figures.shared_hits)
            held |= {(name, books.tier.name.lower()): 0 for books in cache.store.tiers}
        for books in cache.store.tiers:
            for tenant, size in books.pools.held.items():
                place = (tenant.hex(), books.tier.name.lower())
                held[place if place in held else ("", place[1])] += size
        for place, size in held.items():
            self._held.labels(*place).set(size)

    def _follow(self, counter: Any, labels: tuple[str, ...], value: float) -> None:
        """Bring a counter up to a value that only grows."""
        key = (str(id(counter)), *labels)
        counter.labels(*labels).inc(value - self._seen.get(key, 0))
        self._seen[key] = value
