"""Figures with their noise: a task yields items, a figure is a ratio of sums over them with a bootstrap interval.

Two configurations do the same items, so that what one loses against the other is far surer than either figure: both
are drawn together, item by item (the paired bootstrap; Efron and Tibshirani, 1993, chapter 8).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
RESAMPLES = 1000


@dataclass(frozen=True)
class Item:
    """One independent unit of a task (a document, a context, a dialogue): it adds `gain` per `base`."""

    gain: float
    base: float


@dataclass(frozen=True)
class Figure:
    """A named result: the ratio sum(gain) / sum(base), and the interval that holds it with 95 % confidence."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    items: int
    better: str  # "higher" or "lower"
    samples: tuple[tuple[float, float], ...] = ()  # gain and base of every item, in the order of the task


@dataclass(frozen=True)
class Loss:
    """How much worse a figure is than the same figure elsewhere, in per cent of that, with its 95 % interval."""

    percent: float
    low: float
    high: float


def estimate(name: str, items: Sequence[Item], unit: str, better: str, seed: int = 0) -> Figure:
    """The figure of `items` with a percentile bootstrap over items; raises ValueError for no items."""
    if not items:
        raise ValueError(f"{name}: no items, a figure needs at least one")
    rng = random.Random(f"{seed}/{name}")
    values = []
    for _ in range(RESAMPLES):
        drawn = rng.choices(items, k=len(items))
        base = sum(i.base for i in drawn)
        if base:
            values.append(sum(i.gain for i in drawn) / base)
    value = sum(i.gain for i in items) / sum(i.base for i in items)
    return Figure(name, value, *_interval(values), unit, len(items), better, tuple((i.gain, i.base) for i in items))


def loss(reference: Figure, other: Figure, seed: int = 0) -> Loss | None:
    """What ``other`` loses against ``reference``; negative where it is better.

    None where they did other items, or where the reference is zero.
    """
    if len(reference.samples) != len(other.samples) or not reference.samples or not reference.value:
        return None
    pairs = list(zip(reference.samples, other.samples, strict=True))
    sign = 1.0 if other.better == "lower" else -1.0

    def percent(drawn: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> float | None:
        sums = [sum(pair[side][part] for pair in drawn) for side in (0, 1) for part in (0, 1)]
        return sign * 100 * (sums[2] * sums[1] / (sums[3] * sums[0]) - 1) if sums[0] and sums[1] and sums[3] else None

    rng = random.Random(f"{seed}/{other.name}/loss")
    drawn = (percent(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    whole = percent(pairs)
    assert whole is not None
    return Loss(whole, *_interval([value for value in drawn if value is not None]))


def _interval(values: list[float]) -> tuple[float, float]:
    values = sorted(values)
    tail = (1 - CONFIDENCE) / 2
    return values[int(tail * len(values))], values[min(len(values) - 1, int((1 - tail) * len(values)))]
