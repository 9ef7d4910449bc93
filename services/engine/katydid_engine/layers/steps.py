"""Work that pauses wherever rows are under way between ranks, so that something else can be computed meanwhile."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

__all__ = ["Steps", "finish", "interleave"]

_T = TypeVar("_T")
Steps = Generator[None, None, _T]


def finish(steps: Steps[_T]) -> _T:
    """Runs one piece of work to its end; at a pause it waits for what is under way."""
    return interleave([steps])[0]


def interleave(works: Sequence[Steps[_T]]) -> list[_T]:
    """Runs several in turns: while one's rows are under way the next computes. Every rank must have as many, and they
    pause as often as each other."""
    results: dict[int, _T] = {}
    running = dict(enumerate(works))
    while running:
        for index, work in list(running.items()):
            try:
                next(work)
            except StopIteration as end:
                results[index] = end.value
                del running[index]
    return [results[index] for index in range(len(works))]
