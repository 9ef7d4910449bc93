"""The service's figures as records."""

from __future__ import annotations

from katydid.kvcache.v1 import kvcache_pb2 as pb

from katydid_cache.records import CacheStats, ReadSpeed, Tier, TierStats

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
        speeds=tuple(ReadSpeed(Tier(each.tier), each.up_to_bytes, each.bytes_per_s) for each in response.speeds),
        pulled=response.pulled,
        sent_bytes=response.sent_bytes,
        received_bytes=response.received_bytes,
    )
