"""Heat of runs, and where else they are."""

from __future__ import annotations

from katydid_cache.hot_runs import HotRuns


def test_a_run_is_hot_after_hits_in_a_short_time_and_cools_down() -> None:
    hot = HotRuns(threshold=4.0, half_life_s=10.0)
    assert [hot.hit(b"run", 0.0) for _ in range(4)] == [False, False, False, True]
    assert [hot.hit(b"later", 1000.0 + number) for number in range(5)] == [False, False, False, False, True]
    assert hot.hit(b"run", 1.0)
    assert not hot.hit(b"run", 41.0), "four half-lives later little is left"
    assert not any(hot.hit(b"other", 100.0 * number) for number in range(20)), "hits far apart make nothing hot"


def test_extra_homes_are_kept_once_each() -> None:
    hot = HotRuns()
    assert hot.also_at(b"run") == ()
    for name in ("a:1", "b:1", "a:1"):
        hot.put_at(b"run", name)
    assert hot.also_at(b"run") == ("a:1", "b:1")


def test_a_stray_run_is_to_be_copied_until_it_has_been() -> None:
    runs = HotRuns()
    assert runs.stray(b"run", "b:1")
    assert runs.also_at(b"run") == ("b:1",)
    assert runs.stray(b"run", "b:1"), "the first copy may have failed"
    runs.copied(b"run", "a:1")
    assert not runs.stray(b"run", "b:1")
    assert runs.also_at(b"run") == ("b:1", "a:1")


def test_a_run_that_was_put_elsewhere_on_purpose_is_no_stray() -> None:
    runs = HotRuns()
    runs.put_at(b"run", "b:1")
    assert not runs.stray(b"run", "b:1")
