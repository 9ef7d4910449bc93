"""Seconds by phase of a start."""

from __future__ import annotations

import pytest
from katydid_engine.start_times import StartTimes


def test_phases_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [12.0]
    monkeypatch.setattr("katydid_engine.start_times.time.monotonic", lambda: now[0])
    times = StartTimes(since=10.0)
    times.over("imports")
    now[0] = 15.0
    times.over("weights")
    now[0] = 15.5
    times.over("imports")
    assert times.seconds == {"imports": 2.5, "weights": 3.0}
    assert list(times.seconds) == ["imports", "weights"], "in the order in which they first came"
