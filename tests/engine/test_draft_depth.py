"""Automatic draft depth: it finds what brings most tokens a second, follows changes, and is off where none pays."""

from __future__ import annotations

import random

import pytest
from katydid_engine.draft_depth import MAX_DRAFTS, DraftDepth


class Machine:
    """Steps of ``rows`` decodes with drafts accepted at ``rate``; each drafted token costs ``draft_s`` a row."""

    def __init__(self, depth: DraftDepth, rate: float, base_s: float, token_s: float, seed: int = 0) -> None:
        self.depth, self.rate, self.base_s, self.token_s = depth, rate, base_s, token_s
        self.chooser = random.Random(seed)

    def run(self, rows: int, steps: int) -> list[int]:
        chosen = []
        for _ in range(steps):
            drafts = self.depth.choose(rows)
            chosen.append(drafts)
            for _ in range(rows):
                accepted = 0
                while accepted < drafts and self.chooser.random() < self.rate:
                    accepted += 1
                self.depth.verified(drafts, accepted)
            noise = self.chooser.uniform(0.95, 1.05)
            self.depth.took(rows, drafts, noise * (self.base_s + rows * (1 + drafts) * self.token_s))
        return chosen


def share(chosen: list[int], depth: int) -> float:
    return sum(drafts == depth for drafts in chosen) / len(chosen)


def test_what_it_is_told() -> None:
    assert DraftDepth(0).choose(5) == 0
    assert DraftDepth(2).choose(500) == 2


@pytest.mark.parametrize(
    ("rate", "base_s", "token_s", "rows", "best"),
    [
        (0.9, 0.010, 0.0001, 1, 3),
        (0.9, 0.010, 0.0001, 64, 3),
        (0.5, 0.010, 0.0030, 8, 0),
        (0.02, 0.010, 0.0005, 4, 0),
        (0.5, 0.010, 0.0010, 4, 1),
    ],
)
def test_the_depth_that_brings_most(rate: float, base_s: float, token_s: float, rows: int, best: int) -> None:
    machine = Machine(DraftDepth(MAX_DRAFTS, automatic=True), rate, base_s, token_s)
    machine.run(rows, 400)
    tokens = [sum(rate**place for place in range(depth + 1)) for depth in range(4)]
    speeds = [tokens[depth] / (base_s + rows * (1 + depth) * token_s) for depth in range(4)]
    assert max(range(4), key=lambda depth: speeds[depth]) == best
    assert share(machine.run(rows, 1000), best) > 0.9


def test_it_follows_what_changes() -> None:
    machine = Machine(DraftDepth(MAX_DRAFTS, automatic=True), 0.95, 0.010, 0.0005)
    assert share(machine.run(4, 500), 3) > 0.9
    machine.rate = 0.01
    machine.run(4, 400)
    assert share(machine.run(4, 600), 0) > 0.9
    machine.rate = 0.95
    machine.run(4, 2500)
    assert share(machine.run(4, 500), 3) > 0.8, "it is tried again now and then"


def test_batch_sizes_are_told_apart() -> None:
    depth = DraftDepth(MAX_DRAFTS, automatic=True)
    small = Machine(depth, 0.7, 0.010, 0.0010)
    for _ in range(30):
        small.run(1, 30)
        small.run(64, 30)
    assert share(small.run(1, 200), 0) == 0
    assert share(small.run(64, 200), 0) > 0.9
