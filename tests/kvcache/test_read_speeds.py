"""Expected times of reads from measured ones."""

from __future__ import annotations

import pytest
from katydid_cache.records import Tier
from katydid_kvcache.read_speeds import ReadSpeeds

MIB = 1 << 20


def test_a_measured_speed_replaces_the_assumed_one_and_follows_change() -> None:
    speeds = ReadSpeeds()
    assert speeds.seconds(Tier.DISK, 1000, MIB) == pytest.approx(1000 * MIB / 1e9)
    assert speeds.seconds(Tier.DISK, 0, MIB) == 0.0
    speeds.note(Tier.DISK, 2 * MIB, 0.01)
    assert speeds.seconds(Tier.DISK, 10, 2 * MIB) == pytest.approx(0.1)
    for _ in range(100):
        speeds.note(Tier.DISK, 2 * MIB, 0.02)
    assert speeds.seconds(Tier.DISK, 10, 2 * MIB) == pytest.approx(0.2, rel=0.01)
    speeds.note(Tier.DISK, 0, 1.0)
    assert list(speeds) == [(Tier.DISK, 2 * MIB, pytest.approx(100 * MIB, rel=0.01))]


def test_sizes_are_told_apart_and_the_nearest_stands_in() -> None:
    speeds = ReadSpeeds()
    speeds.note(Tier.DISK, 4096, 0.001)
    speeds.note(Tier.DISK, 8 * MIB, 0.008)
    assert speeds.seconds(Tier.DISK, 1, 4000) == pytest.approx(4000 / 4_096_000)
    assert speeds.seconds(Tier.DISK, 1, 4 * MIB) == pytest.approx(0.004)
    assert speeds.seconds(Tier.SHARED, 1, 4 * MIB) == pytest.approx(4 * MIB / 0.2e9), "another tier is another matter"


def test_reads_beside_each_other_share_the_tiers_speed() -> None:
    speeds = ReadSpeeds()
    speeds.note(Tier.DISK, MIB, 0.004, at_once=4)
    assert speeds.seconds(Tier.DISK, 100, MIB) == pytest.approx(0.1)
