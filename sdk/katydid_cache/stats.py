"""The service's figures as records."""

from __future__ import annotations

from katydid.kvcache.v1 import kvcache_pb2 as pb

from katydid_cache.records import CacheStats, Tier, TierStats

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
    )
