"""The breaker opens after failures in a row, longer each time, and lets one try through when its time is over."""

from __future__ import annotations

from katydid_kvcache.shared.breaker import Breaker


def test_a_life_of_a_breaker() -> None:
    now = [0.0]
    breaker = Breaker(failures=2, first_s=1, longest_s=3, now=lambda: now[0])
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    assert breaker.allow(), "failures that are not in a row are forgiven"
    breaker.failed()
    assert not breaker.closed
    assert not breaker.allow()
    now[0] = 1.0
    assert breaker.allow()
    assert not breaker.allow(), "one try at a time"
    breaker.failed()
    for pause in (2.0, 3.0, 3.0):
        now[0] += pause - 0.01
        assert not breaker.allow()
        now[0] += 0.01
        assert breaker.allow()
        breaker.failed()
    now[0] += 3.0
    assert breaker.allow()
    breaker.succeeded()
    assert breaker.allow()
    assert breaker.allow()


def test_tries_that_were_under_way_when_it_opened_do_not_keep_it_open_longer() -> None:
    now = [0.0]
    breaker = Breaker(failures=3, first_s=1, longest_s=60, now=lambda: now[0])
    for _ in range(16):
        breaker.failed()
    now[0] = 1.0
    assert breaker.allow(), "sixteen reads that failed together are one failure of the store"
    for _ in range(16):
        breaker.failed()
    now[0] = 2.9
    assert not breaker.allow()
    now[0] = 3.0
    assert breaker.allow()
