"""What a step with prompt tokens will take, learnt from the steps that were.

    seconds = a + b * tokens + c * pairs

of prompt tokens, and of pairs of one with a token that it attends to; decodes beside them are in ``a``, which changes
little while they come and go. The three are fitted to the newest steps by least squares of relative errors, to some
of each size of late, and held by a small weight to what they were, for steps that are all alike do not tell them apart.
No three numbers fit every size: what a step may take at most goes by the newest of its own size as well.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Sequence

__all__ = ["StepCost"]

# Of a step its number, its tokens, and what of its seconds a second of ``a`` would be, and so on.
_Seen = tuple[int, int, tuple[float, float, float]]

# The newest, and of each size so many more of so many steps.
_STEPS, _OF_A_SIZE, _LATELY = 48, 6, 256
# Of the old values against one step; how far a step's time may jump (a first use, a page fault).
_HOLD, _MOST_JUMP = 0.02, 4.0
# What a size that is hardly known may take of what was fitted; the least that was fitted of what a step took.
_UNKNOWN, _LEAST_SHARE = 1.02, 1e-3


class StepCost:
    """Seconds of steps with prompt tokens; 0 for all of them until ``took`` was told of one."""

    def __init__(self) -> None:
        self._known: Sequence[float] = (0.0, 0.0, 0.0)
        self._seen: list[_Seen] = []  # the newest first
        self._count = 0
        self._sizes: set[int] = set()
        self._most: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._seen)

    @property
    def only_size(self) -> int | None:
        """Tokens of all steps so far, where these are as many: what a step takes without them is anybody's guess."""
        return next(iter(self._sizes)) if len(self._sizes) == 1 else None

    @property
    def least_s(self) -> float:
        """Of a step, before any token."""
        return self._known[0]

    def seconds(self, tokens: int, context: float, steps: float = 1.0) -> float:
        """Of ``tokens`` of a prompt behind ``context``, in so many steps."""
        first, token, pair = self._known
        return steps * first + token * tokens + pair * tokens * (context + (tokens + 1) / 2)

    def most_s(self, tokens: int, context: float) -> float:
        """What a step with so many tokens will hardly exceed: as much more than was fitted as the newest steps of that
        size took, all but one of them (a hiccup tells nothing of the next)."""
        if tokens not in self._most:
            shares = itertools.islice((shares for _, count, shares in self._seen if count == tokens), _OF_A_SIZE)
            found = sorted(1 / max(_LEAST_SHARE, sum(map(operator.mul, self._known, step))) for step in shares)
            self._most[tokens] = found[-2] if len(found) > 2 else max([_UNKNOWN, *found])
        return self._most[tokens] * self.seconds(tokens, context)

    def tokens(self, seconds: float, context: float) -> int:
        """How many prompt tokens behind ``context`` fit that time; 0 if none do."""
        first, token, pair = self._known
        left, linear, square = seconds - first, token + pair * (context + 0.5), pair / 2
        if left <= 0 or not (linear or square):
            return 0
        # The positive root of square * n^2 + linear * n = left, in the form that stays exact for a small square.
        return int(2 * left / (linear + (linear * linear + 4 * square * left) ** 0.5))

    def took(self, tokens: int, pairs: float, seconds: float) -> None:
        """A step with so many prompt tokens and pairs has taken so long."""
        first, token, pair = self._known
        if self._seen:
            seconds = min(seconds, _MOST_JUMP * (first + token * tokens + pair * pairs))
        else:
            self._known = (0.0, seconds / tokens, 0.0)
        if len(self._sizes) < 2:
            self._sizes.add(tokens)
        self._count += 1
        self._seen = self._lately(
            [(self._count, tokens, (1 / seconds, tokens / seconds, pairs / seconds)), *self._seen]
        )
        self._known = _fitted([shares for _, _, shares in self._seen], self._known)
        self._most.clear()

    def _lately(self, steps: Sequence[_Seen]) -> list[_Seen]:
        sizes = Counter[int]()
        kept = []
        for place, step in enumerate(steps):
            number, tokens, _ = step
            sizes[tokens] += 1
            if place < _STEPS or (sizes[tokens] <= _OF_A_SIZE and self._count - number < _LATELY):
                kept.append(step)
        return kept


def _fitted(steps: Sequence[tuple[float, float, float]], held: Sequence[float]) -> list[float]:
    """Values of the three, none below 0, whose shares add up closest to 1 in every step."""
    scale = [max(step[i] for step in steps) for i in range(3)]
    rows = [[step[i] / scale[i] for i in range(3)] for step in steps]
    held = [held[i] * scale[i] for i in range(3)]
    free = [0, 1, 2]
    while True:
        found = _solved(
            [[sum(row[i] * row[j] for row in rows) + _HOLD * (i == j) for j in free] for i in free],
            [sum(row[i] for row in rows) + _HOLD * held[i] for i in free],
        )
        if min(found, default=0.0) >= 0:
            values = dict(zip(free, found, strict=True))
            return [values.get(i, 0.0) / scale[i] for i in range(3)]
        # The lowest is nothing; the others make up for it.
        free.pop(found.index(min(found)))


def _solved(left: list[list[float]], right: list[float]) -> list[float]:
    """By elimination; ``left`` is symmetric and positive definite."""
    rows = [[*row, value] for row, value in zip(left, right, strict=True)]
    for at, row in enumerate(rows):
        for below in rows[at + 1 :]:
            factor = below[at] / row[at]
            for column in range(at, len(row)):
                below[column] -= factor * row[column]
    found = [0.0] * len(rows)
    for at in reversed(range(len(rows))):
        known = sum(rows[at][column] * found[column] for column in range(at + 1, len(rows)))
        found[at] = (rows[at][-1] - known) / rows[at][at]
    return found
