"""Intervals by the bootstrap: as wide as they say, and paired where two figures are of the same items."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_cli.evaluation.figures import Figure, Item, estimate, loss

shares = st.lists(st.tuples(st.floats(0, 10), st.floats(0.5, 10)), min_size=1, max_size=30)


@given(shares)
def test_the_interval_holds_the_value_of_the_resamples_extremes(pairs: list[tuple[float, float]]) -> None:
    figure = estimate("f", [Item(g, b) for g, b in pairs], "share", "higher")
    ratios = [g / b for g, b in pairs]
    assert min(ratios) - 1e-9 <= figure.low <= figure.high <= max(ratios) + 1e-9
    assert figure.value == pytest.approx(sum(g for g, _ in pairs) / sum(b for _, b in pairs))


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(1)
    covered = 0
    for trial in range(100):
        items = [Item(float(rng.random() < 0.7), 1) for _ in range(60)]
        figure = estimate(f"trial {trial}", items, "share", "higher")
        covered += figure.low <= 0.7 <= figure.high
    assert 85 <= covered <= 100


def test_equal_items_leave_no_noise_and_the_same_items_the_same_interval() -> None:
    figure = estimate("f", [Item(1, 2)] * 9, "share", "higher")
    assert figure.low == figure.high == figure.value == 0.5
    items = [Item(i % 3, 2) for i in range(20)]
    assert estimate("g", items, "share", "higher") == estimate("g", items, "share", "higher")


def test_no_items_is_an_error() -> None:
    with pytest.raises(ValueError, match="recall: no items"):
        estimate("recall", [], "share", "higher")


def test_a_loss_is_surer_than_the_figures_it_compares() -> None:
    rng = random.Random(3)
    bits = [rng.uniform(0.3, 1.5) for _ in range(60)]
    plain, rounded = (
        estimate("code.bits_per_byte", [Item(b * factor, 1) for b in bits], "bit/byte", "lower")
        for factor in (1.0, 1.01)
    )
    lost = loss(plain, rounded)
    assert lost is not None
    assert lost.percent == pytest.approx(1.0)
    assert lost.high - lost.low < 1e-6 < (plain.high - plain.low) / 100


def test_a_lower_share_is_a_loss_and_a_higher_one_a_gain() -> None:
    first, second = (
        estimate("f", [Item(hit, 1) for hit in hits], "share", "higher") for hits in ([1, 1, 1, 0], [1, 1, 0, 0])
    )
    assert (lost := loss(first, second)) is not None
    assert lost.percent == pytest.approx(100 / 3)
    assert lost.low <= lost.percent <= lost.high
    assert (won := loss(second, first)) is not None
    assert won.percent == pytest.approx(-50)


def test_items_that_are_not_the_same_are_not_compared() -> None:
    few, many = (estimate("f", [Item(1, 1)] * count, "share", "higher") for count in (3, 4))
    assert loss(few, many) is None
    none = estimate("f", [Item(0, 1)] * 3, "share", "higher")
    assert loss(none, few) is None
    assert loss(Figure("f", 1.0, 1.0, 1.0, "share", 3, "higher"), few) is None
