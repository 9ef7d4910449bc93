"""Token budgets: what a tenant gets over any time is its rate and one bucket, and what is not used goes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_gateway.flow.budgets import Budgets, Reservation, TenantTerms

RATE = 600  # ten a second


def budgets(tokens_per_minute: int | None = RATE) -> Budgets:
    return Budgets(lambda _tenant: TenantTerms(tokens_per_minute=tokens_per_minute))


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 2000), st.integers(0, 2000)), max_size=40))
def test_nobody_gets_more_than_its_rate(asked: list[tuple[float, int, int]]) -> None:
    account, now, used = budgets(), 0.0, 0
    for wait, tokens, really in asked:
        now += wait
        reservation = account.reserve("t", tokens, now)
        if isinstance(reservation, Reservation):
            account.settle(reservation, really, now)
            account.settle(reservation, 10**9, now)
            used += really
            # One request may overdraw; its debt is what the next one waits for.
            assert used <= RATE + now * RATE / 60 + really + 1e-6
        else:
            assert reservation > 0
            later = account.reserve("t", tokens, now + reservation + 1e-6)
            assert isinstance(later, Reservation), "it can be had when it was said"
            account.settle(later, 0, now + reservation + 1e-6)
            now += reservation + 1e-6
    assert account.reserved == 0


def test_what_was_not_used_goes_back() -> None:
    account = budgets()
    reservation = account.reserve("t", 500, 0.0)
    assert isinstance(reservation, Reservation)
    assert account.left("t", 0.0) == 100
    account.settle(reservation, 50, 0.0)
    assert account.left("t", 0.0) == 550
    assert account.left("t", 60.0) == RATE


def test_a_request_larger_than_the_bucket_is_served_and_paid_for() -> None:
    account = budgets()
    assert isinstance(account.reserve("t", 3000, 0.0), Reservation)
    wait = account.reserve("t", 1, 0.0)
    assert wait == pytest.approx((2400 + 1) / 10)


def test_without_a_limit_nothing_is_counted() -> None:
    account = budgets(None)
    reservation = account.reserve("t", 10**9, 0.0)
    assert isinstance(reservation, Reservation)
    account.settle(reservation, 10**9, 0.0)
    assert account.left("t", 0.0) is None
