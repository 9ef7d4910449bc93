"""Which prompt a step goes on with, so that as many as possible have their first token in time, and none never.

A prompt has work left and time left. Those that can all be in time are found by Moore's algorithm (J. M. Moore, 1968:
in order of their deadlines, and whenever one would be late the longest so far is given up), which leaves as many as
possible. Of these the shortest comes first that makes none of the others late; a first token that comes early is worth
more than one in time. Those that were given up come in order of their arrival, when nobody else is there, and in
every fourth step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Due", "in_time", "in_turn", "next_prompt"]

_TURNS = 4


@dataclass(frozen=True, slots=True)
class Due:
    """A prompt on its way: seconds of work that it needs, and until it is late."""

    work_s: float
    left_s: float


def in_time(prompts: Sequence[Due]) -> list[int]:
    """Indices of the most that can all be in time, in order of their deadlines."""
    kept: list[int] = []
    busy = 0.0
    for index in sorted(range(len(prompts)), key=lambda index: prompts[index].left_s):
        kept.append(index)
        busy += prompts[index].work_s
        if busy > prompts[index].left_s:
            longest = max(kept, key=lambda index: prompts[index].work_s)
            kept.remove(longest)
            busy -= prompts[longest].work_s
    return kept


def next_prompt(prompts: Sequence[Due], turn: int) -> int:
    """The index of the one that a step goes on with; ``prompts``, at least one, are in order of arrival, and ``turn``
    counts the steps."""
    kept = in_time(prompts)
    late = [index for index in range(len(prompts)) if index not in kept]
    if late and (not kept or turn % _TURNS == 0):
        return late[0]
    passes = (
        index
        for index in sorted(kept, key=lambda index: prompts[index].work_s)
        if _all_in_time([index, *(other for other in kept if other != index)], prompts)
    )
    # Sums in another order may round to more than the time left: then the order of deadlines is what was found.
    return next(passes, kept[0])


def in_turn(count: int, turn: int) -> int:
    """Likewise of so many prompts that nothing is known of: every other step goes to the first, those in between to the
    others in order."""
    return 1 + turn // 2 % (count - 1) if turn % 2 and count > 1 else 0


def _all_in_time(order: Sequence[int], prompts: Sequence[Due]) -> bool:
    busy = 0.0
    for index in order:
        busy += prompts[index].work_s
        if busy > prompts[index].left_s:
            return False
    return True
