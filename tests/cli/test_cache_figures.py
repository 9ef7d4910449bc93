"""Figures of cache services as text."""

from __future__ import annotations

import dataclasses

from katydid_cache import CacheStats, Tier, TierStats
from katydid_cache.records import ReadSpeed
from katydid_cli.cache.figures import TIERS_HEAD, TOP_HEAD, bytes_text, jsonable, speed_rows, tier_rows, top_row

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
    assert speed_rows(STATS) == [("disk", "2.0 MiB", "954 MiB/s")]


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
