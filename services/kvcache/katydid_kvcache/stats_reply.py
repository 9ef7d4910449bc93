"""The cache's books as the answer to Stats."""

from __future__ import annotations

from katydid.kvcache.v1 import kvcache_pb2 as pb

from katydid_kvcache.cache import Cache
from katydid_kvcache.tier_books import TierBooks

__all__ = ["stats_reply"]


def stats_reply(cache: Cache) -> pb.StatsResponse:
    """What stands in the books now."""
    return pb.StatsResponse(
        tiers=[_tier(books) for books in cache.store.tiers],
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
    )


def _tier(books: TierBooks) -> pb.TierStats:
    counters = books.counters
    return pb.TierStats(
        tier=pb.Tier.ValueType(books.tier),
        blocks=books.blocks,
        bytes=books.bytes,
        capacity_bytes=books.slots.capacity_bytes,
        hits=counters.hits,
        misses=counters.misses,
        writes=counters.writes,
        evictions=counters.evictions,
        corrupt=counters.corrupt,
        shed=counters.shed,
    )
