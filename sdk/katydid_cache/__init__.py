"""Client of the KV-cache service: join a namespace, look chains up under leases, read and write blocks.

cache = CacheClient("127.0.0.1:7301", name="engine-0", degrade=True)
await cache.attach(identity, BlockLayout(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16"))
found = await cache.lookup(hashes)
got = await cache.get(found.lease, hashes[: 32 * found.blocks], into=buffers)
await cache.release(found.lease)
"""

from katydid_runtime.tls import Tls

from katydid_cache.admin import BlockInfo, CacheAdmin, NamespaceInfo, Verification
from katydid_cache.allocation import keep_buffers_mapped
from katydid_cache.arena import ArenaMapping
from katydid_cache.arena_slots import ArenaSlot, ArenaSlots
from katydid_cache.asking import Asker, asking
from katydid_cache.client import CacheClient
from katydid_cache.fleet import CacheFleet
from katydid_cache.in_place import GIVEN_UP, NOT_WRITTEN, InPlace, Reservation
from katydid_cache.instances import Instances
from katydid_cache.layout import BlockLayout, Span
from katydid_cache.near import NearCache
from katydid_cache.opening import Cache, open_cache
from katydid_cache.records import (
    BlockChange,
    BlockMissReason,
    CacheStats,
    Durability,
    GetResult,
    HitRate,
    LookupResult,
    PrefetchResult,
    PutBlock,
    PutOutcome,
    PutRefusal,
    PutStatus,
    Snapshot,
    TenantStats,
    TenantTierStats,
    Tier,
    TierRun,
    TierStats,
    TierTime,
    WatchEvent,
)

__all__ = [
    "GIVEN_UP",
    "NOT_WRITTEN",
    "ArenaMapping",
    "ArenaSlot",
    "ArenaSlots",
    "Asker",
    "BlockChange",
    "BlockInfo",
    "BlockLayout",
    "BlockMissReason",
    "Cache",
    "CacheAdmin",
    "CacheClient",
    "CacheFleet",
    "CacheStats",
    "Durability",
    "GetResult",
    "HitRate",
    "InPlace",
    "Instances",
    "LookupResult",
    "NamespaceInfo",
    "NearCache",
    "PrefetchResult",
    "PutBlock",
    "PutOutcome",
    "PutRefusal",
    "PutStatus",
    "Reservation",
    "Snapshot",
    "Span",
    "TenantStats",
    "TenantTierStats",
    "Tier",
    "TierRun",
    "TierStats",
    "TierTime",
    "Tls",
    "Verification",
    "WatchEvent",
    "asking",
    "keep_buffers_mapped",
    "open_cache",
]
