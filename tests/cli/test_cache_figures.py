"""Figures of cache services as text."""

from __future__ import annotations

import dataclasses

from katydid_cache import CacheStats, Tier, TierStats
from katydid_cache.records import HitRate, ReadSpeed, TenantStats, TenantTierStats
from katydid_cli.cache.figures import (
    TENANTS_HEAD,
    TIERS_HEAD,
    TOP_HEAD,
    WHAT_IF_HEAD,
    bytes_text,
    jsonable,
    speed_rows,
    tenant_rows,
    tier_rows,
    top_row,
    what_if_rows,
)

MEMORY = TierStats(
    blocks=3, bytes=512, capacity_bytes=1024, hits=30, misses=10, writes=3, evictions=2, corrupt=0, shed=1
)
DISK = dataclasses.replace(MEMORY, hits=4, misses=6, bytes=256)
STATS = CacheStats({Tier.MEMORY: MEMORY, Tier.DISK: DISK}, 1, 0, 2, 0, 7, (ReadSpeed(Tier.DISK, 2 << 20, 1e9),))


def test_sizes_have_units() -> None:
    assert [bytes_text(size) for size in (0, 1023, 1536, 200 << 20, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "200 MiB",
        "5.0 TiB",
    ]


def test_a_row_a_tier() -> None:
    memory, disk = tier_rows(STATS)
    assert len(memory) == len(TIERS_HEAD)
    assert memory[:6] == ("memory", "3", "512 B", "1.0 KiB", "75.0 %", "30")
    assert disk[:6] == ("disk", "3", "256 B", "1.0 KiB", "40.0 %", "4")
    (shared,) = tier_rows(dataclasses.replace(STATS, tiers={Tier.SHARED: dataclasses.replace(DISK, capacity_bytes=0)}))
    assert shared[:4] == ("shared", "3", "256 B", "-"), "nobody told how much it may hold"
    assert speed_rows(STATS) == [("disk", "2.0 MiB", "954 MiB/s")]


def test_tenants_and_other_sizes_have_a_row_each() -> None:
    tiers = {Tier.MEMORY: TenantTierStats(2048, 640, 4096, 0, 0), Tier.DISK: TenantTierStats(1024, 64, 1024, 0, 0)}
    stats = dataclasses.replace(
        STATS,
        tenants={b"\x01" * 16: TenantStats(tiers, 128, 2.5, 3, 1), b"": TenantStats({}, 0, 0.0, 0, 0)},
        tiers={Tier.MEMORY: dataclasses.replace(MEMORY, hit_rates=(HitRate(2048, 0.5, 0.25),))},
    )
    tenant, others = tenant_rows(stats)
    assert len(tenant) == len(TENANTS_HEAD)
    assert tenant == ("01" * 16, "640", "64", "0", "128", "5.0 KiB", "3.0 KiB", "2.5 s", "3", "1")
    assert others[0] == "-"
    assert what_if_rows(stats) == [("memory", "2.0 KiB", "50.0 %", "25.0 %")]
    assert len(WHAT_IF_HEAD) == 4


def test_rates_are_the_difference_of_two_looks_and_none_across_a_restart() -> None:
    later = dataclasses.replace(
        STATS,
        tiers={
            Tier.MEMORY: dataclasses.replace(MEMORY, hits=50, misses=15, writes=13),
            Tier.DISK: dataclasses.replace(DISK, hits=8, misses=7),
        },
        sent_bytes=4096,
        received_bytes=2048,
    )
    row = dict(zip(TOP_HEAD, top_row("a:1", STATS, later, 2.0), strict=True))
    assert (row["hits/s"], row["misses/s"], row["writes/s"], row["evicted/s"]) == ("12", "0", "5", "0")
    assert (row["out"], row["in"], row["memory"]) == ("2.0 KiB/s", "1.0 KiB/s", "50.0 %")
    restarted = dataclasses.replace(later, boot_epoch=8)
    assert top_row("a:1", STATS, restarted, 2.0)[5:] == ("-",) * 6
    assert top_row("a:1", None, later, 0.0)[5:] == ("-",) * 6


def test_json_has_names_and_hex() -> None:
    plain = jsonable(STATS)
    assert plain["tiers"]["memory"]["hits"] == 30
    assert plain["speeds"] == [{"tier": "disk", "up_to_bytes": 2 << 20, "bytes_per_s": 1e9}]
