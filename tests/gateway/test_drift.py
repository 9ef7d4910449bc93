"""Whether engines hold what routing says they do: one alarm for a picture that is wrong, none for one that is right."""

from __future__ import annotations

from katydid_gateway.routing.drift import CacheDrift


def test_a_picture_of_caches_that_is_wrong_is_told_once() -> None:
    """Hashes that differ show as nothing but zero overlap."""
    drift = CacheDrift()
    assert drift.share("e") == 1.0
    turned = [drift.found("e", 10_000, 0) for _ in range(10)]
    # Five predictions, of which older ones count for less, are not 50,000 tokens yet.
    assert turned == [False] * 5 + [True] + [False] * 4
    assert drift.share("e") == 0.0
    assert not any(drift.found("e", 10_000, 12_000) for _ in range(200))
    assert drift.share("e") > 0.9
    assert not any(drift.found("cold", 0, 5_000) for _ in range(50))
    assert any(drift.found("e", 10_000, 100) for _ in range(200))


def test_an_alarm_stands_until_the_picture_is_well_right() -> None:
    drift = CacheDrift()
    turns = [
        sum(drift.found("e", 10_000, found) for _ in range(300)) for found in (0, 7_000, 0, 9_000, 7_000, 0, 7_000, 0)
    ]
    assert turns == [1, 0, 0, 0, 0, 1, 0, 0]
