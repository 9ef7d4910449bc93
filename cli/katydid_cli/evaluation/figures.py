"""Figures with their noise: a task yields items, a figure is a ratio of sums over them with a bootstrap interval."""

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
    values.sort()
    tail = (1 - CONFIDENCE) / 2
    low, high = values[int(tail * len(values))], values[min(len(values) - 1, int((1 - tail) * len(values)))]
    value = sum(i.gain for i in items) / sum(i.base for i in items)
    return Figure(name, value, low, high, unit, len(items), better)
