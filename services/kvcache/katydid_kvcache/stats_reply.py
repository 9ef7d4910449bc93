"""The cache's books as the answer to Stats."""

from __future__ import annotations

from typing import Any

from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.duration import to_duration

from katydid_kvcache.cache import Cache
from katydid_kvcache.shared.books import SharedBooks
from katydid_kvcache.tenants import TenantFigures
from katydid_kvcache.tier_books import TierBooks

__all__ = ["stats_reply"]


def stats_reply(cache: Cache) -> pb.StatsResponse:
    """What stands in the books now."""
    return pb.StatsResponse(
        tiers=[_tier(books) for books in cache.store.tiers] + _shared(cache),
        leases=len(cache.leases),
        reservations=len(cache.reservations),
        attachments=len(cache.attachments),
        quarantined=cache.quarantined,
        boot_epoch=cache.boot_epoch,
        speeds=[
            pb.ReadSpeed(tier=pb.Tier.ValueType(tier), up_to_bytes=size, bytes_per_s=speed)
            for tier, size, speed in cache.speeds
        ],
        pulled=cache.traffic.pulled_blocks,
        sent_bytes=cache.traffic.sent_bytes,
        received_bytes=cache.traffic.received_bytes,
        tenants=[_tenant(cache, tenant, figures) for tenant, figures in cache.tenants],
    )


def _tier(books: TierBooks) -> pb.TierStats:
    return pb.TierStats(
        **_counts(books),
        capacity_bytes=books.slots.capacity_bytes,
        eviction=books.policy.eviction,
        admission=books.policy.admission,
        hit_rates=[
            pb.HitRatePoint(
                capacity_bytes=point.capacity_bytes, admit_all=point.admit_all, second_touch=point.second_touch
            )
            for point in books.ghosts.hit_rates()
        ],
    )


def _shared(cache: Cache) -> list[pb.TierStats]:
    books = cache.store.shared
    if books is None:
        return []
    return [pb.TierStats(**_counts(books), admission=cache.policy.shared.admission)]


def _counts(books: TierBooks | SharedBooks) -> dict[str, Any]:
    """What all tiers count."""
    counters = books.counters
    return {
        "tier": pb.Tier.ValueType(books.tier),
        "blocks": books.blocks,
        "bytes": books.bytes,
        "hits": counters.hits,
        "misses": counters.misses,
        "writes": counters.writes,
        "evictions": counters.evictions,
        "corrupt": counters.corrupt,
        "shed": counters.shed,
        "sheds": [pb.ShedCount(reason=reason, blocks=blocks) for reason, blocks in sorted(counters.sheds.items())],
    }


def _tenant(cache: Cache, tenant: bytes, figures: TenantFigures) -> pb.TenantStats:
    held = {books.tier: books.pools for books in cache.store.tiers}
    return pb.TenantStats(
        tenant=tenant,
        tiers=[
            pb.TenantTierStats(
                tier=pb.Tier.ValueType(tier),
                bytes=held[tier].held[tenant] if tier in held else 0,
                hit_tokens=figures.hit_tokens[tier],
                hit_bytes=figures.hit_bytes[tier],
                guaranteed_bytes=held[tier].quota(tenant).guaranteed_bytes if tier in held else 0,
                limit_bytes=held[tier].quota(tenant).limit_bytes if tier in held else 0,
            )
            for tier in (*held, *(tier for tier in figures.hit_tokens if tier not in held))
        ],
        missed_tokens=figures.missed_tokens,
        saved_prefill=to_duration(cache.tenants.saved_prefill_s(figures)),
        refused=figures.refused,
        shared_hits=figures.shared_hits,
    )
