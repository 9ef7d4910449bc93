"""The service's figures as records."""

from __future__ import annotations

from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.duration import to_seconds

from katydid_cache.records import CacheStats, HitRate, ReadSpeed, TenantStats, TenantTierStats, Tier, TierStats

__all__ = ["cache_stats"]


def cache_stats(response: pb.StatsResponse) -> CacheStats:
    """What a StatsResponse says."""
    tiers = {
        Tier(tier.tier): TierStats(
            blocks=tier.blocks,
            bytes=tier.bytes,
            capacity_bytes=tier.capacity_bytes,
            hits=tier.hits,
            misses=tier.misses,
            writes=tier.writes,
            evictions=tier.evictions,
            corrupt=tier.corrupt,
            shed=tier.shed,
            sheds={each.reason: each.blocks for each in tier.sheds},
            eviction=tier.eviction,
            admission=tier.admission,
            hit_rates=tuple(
                HitRate(point.capacity_bytes, point.admit_all, point.second_touch) for point in tier.hit_rates
            ),
        )
        for tier in response.tiers
    }
    return CacheStats(
        tiers=tiers,
        leases=response.leases,
        reservations=response.reservations,
        attachments=response.attachments,
        quarantined=response.quarantined,
        boot_epoch=response.boot_epoch,
        speeds=tuple(ReadSpeed(Tier(each.tier), each.up_to_bytes, each.bytes_per_s) for each in response.speeds),
        pulled=response.pulled,
        sent_bytes=response.sent_bytes,
        received_bytes=response.received_bytes,
        tenants={each.tenant: _tenant(each) for each in response.tenants},
    )


def _tenant(stats: pb.TenantStats) -> TenantStats:
    return TenantStats(
        tiers={
            Tier(tier.tier): TenantTierStats(
                tier.bytes, tier.hit_tokens, tier.hit_bytes, tier.guaranteed_bytes, tier.limit_bytes
            )
            for tier in stats.tiers
        },
        missed_tokens=stats.missed_tokens,
        saved_prefill_s=to_seconds(stats.saved_prefill),
        refused=stats.refused,
        shared_hits=stats.shared_hits,
    )
