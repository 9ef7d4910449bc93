"""What steps take is found again from steps, and told before them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.step_cost import StepCost


def pairs(tokens: int, context: int) -> float:
    return sum(context + place + 1 for place in range(tokens))


@given(
    st.floats(1e-3, 0.1),
    st.floats(1e-6, 1e-4),
    st.floats(0, 1e-9),
    st.integers(0, 1000),
)
def test_the_three_are_found(first: float, token: float, pair: float, seed: int) -> None:
    cost, chance = StepCost(), random.Random(seed)
    assert not cost
    for _ in range(120):
        tokens, context = chance.choice([200, 500, 1000, 4000]), chance.choice([0, 3000, 60_000, 120_000])
        work = tokens * context + tokens * (tokens + 1) / 2
        cost.took(tokens, work, (first + token * tokens + pair * work) * chance.uniform(0.97, 1.03))
    for tokens, context in ((300, 1000), (2000, 100_000)):
        expected = first + token * tokens + pair * pairs(tokens, context)
        assert cost.seconds(tokens, context) == pytest.approx(expected, rel=0.1)
        assert cost.seconds(tokens, context, steps=3) == pytest.approx(expected + 2 * first, rel=0.15)


@given(st.integers(1, 5000), st.integers(0, 200_000), st.floats(1e-3, 1))
def test_as_many_tokens_as_fit(tokens: int, context: int, seconds: float) -> None:
    cost = StepCost()
    for n, behind in ((100, 0), (1000, 0), (100, 50_000), (1000, 50_000)) * 12:
        cost.took(n, pairs(n, behind), 0.005 + n * 1e-5 + 1e-9 * pairs(n, behind))
    fitting = cost.tokens(cost.seconds(tokens, context), context)
    assert tokens - 1 <= fitting <= tokens
    most = cost.tokens(seconds, context)
    assert not most or cost.seconds(most, context) <= seconds * (1 + 1e-9)
    assert cost.seconds(most + 1, context) > seconds * (1 - 1e-9)


def test_steps_that_are_all_alike_and_outliers() -> None:
    cost = StepCost()
    for step in range(3000):
        cost.took(500, pairs(500, 8000), 9.0 if step % 100 == 50 else 0.02)
        assert step < 60 or 0.01 < cost.seconds(500, 8000) < 0.04
    assert cost.seconds(1000, 8000) < 0.1
    for _ in range(150):
        cost.took(500, pairs(500, 8000), 0.3)
    assert cost.seconds(500, 8000) == pytest.approx(0.3, rel=0.02), "what lasts is believed"


def test_a_size_that_did_not_fit_is_remembered() -> None:
    """While others are all of one size, and get faster by and by, which says nothing of what a token takes."""
    cost = StepCost()
    for tokens, context in ((2048, 4000), (1536, 9000), (2048, 12_000)) * 3:
        cost.took(tokens, pairs(tokens, context), 0.02 + tokens * 1.5e-5)
    for step in range(200):
        cost.took(1536, pairs(1536, 17_000), (0.02 + 1536 * 1.5e-5) * (1 - 1e-4 * step))
    assert cost.seconds(2048, 17_000) == pytest.approx(0.02 + 2048 * 1.5e-5, rel=0.005)
    assert cost.tokens(0.049, 17_000) < 2048


def test_what_a_step_takes_at_most_goes_by_the_newest_of_its_size() -> None:
    """No line goes through sizes that take one 10 % more than it, another as much less."""
    cost, share = StepCost(), {256: 1.0, 512: 1.1, 1024: 0.9}

    def takes(tokens: int) -> float:
        return share[tokens] * (0.01 + 2e-5 * tokens)

    assert cost.most_s(512, 0) == 0.0
    for _ in range(20):
        for tokens in share:
            cost.took(tokens, pairs(tokens, 0), takes(tokens))
    assert cost.seconds(512, 0) < 0.97 * takes(512)
    for tokens in share:
        assert cost.most_s(tokens, 0) == pytest.approx(takes(tokens), rel=1e-6)
    cost.took(512, pairs(512, 0), 1.5 * takes(512))
    assert cost.most_s(512, 0) == pytest.approx(takes(512), rel=1e-6), "once is a hiccup"
    cost.took(512, pairs(512, 0), 1.5 * takes(512))
    assert cost.most_s(512, 0) == pytest.approx(1.5 * takes(512), rel=1e-6)
    assert cost.seconds(768, 0) < cost.most_s(768, 0) < 1.1 * cost.seconds(768, 0), "of a new size little is known"
