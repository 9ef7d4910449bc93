"""An engine that fails what it is sent is left alone, longer each time, until it answers."""

from __future__ import annotations

from katydid_gateway.routing.breaker import FAILURES, FIRST_S, LONGEST_S, Breaker


def test_the_breaker_opens_tries_and_closes() -> None:
    made = Breaker()
    for _ in range(FAILURES - 1):
        made.failed(0.0)
    made.answered()
    for _ in range(FAILURES):
        assert not made.is_open(0.0)
        made.failed(0.0)
    assert made.is_open(FIRST_S - 0.1)
    made.failed(1.0)
    assert not made.is_open(FIRST_S)
    made.failed(FIRST_S)
    assert made.is_open(FIRST_S + 2 * FIRST_S - 0.1)
    now = FIRST_S
    for _ in range(8):
        now = made.open_until
        made.failed(now)
    assert made.open_until - now == LONGEST_S
    made.answered()
    assert not made.is_open(now)
