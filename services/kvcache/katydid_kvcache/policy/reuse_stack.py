"""How far back in time a key was used last, in bytes of other keys used since: an LRU stack cut into segments.

An LRU cache of any size holds the top of the stack up to that size (Mattson et al., "Evaluation techniques for storage
hierarchies", 1970), so one stack tells what caches of several sizes would hold. Only keys are kept. With keys of
unequal weight the cuts are as exact as the largest key is small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

__all__ = ["ReuseStack"]


class ReuseStack:
    """A stack that is cut at `sizes` (bytes, ascending) and forgets what lies below the last or beyond `most` keys."""

    def __init__(self, sizes: Sequence[int], most: int = 1_000_000) -> None:
        self.sizes = tuple(sizes)
        self._room = [size - below for size, below in zip(sizes, (0, *sizes[:-1]), strict=True)]
        self._segments: list[OrderedDict[Hashable, int]] = [OrderedDict() for _ in sizes]
        self._held = [0] * len(sizes)
        self._most = most
        self._segment_of: dict[Hashable, int] = {}

    def depth(self, key: Hashable) -> int:
        """Number of the smallest size that would hold the key; `len(sizes)` when none would."""
        return self._segment_of.get(key, len(self.sizes))

    def touch(self, key: Hashable, weight: int) -> None:
        """Put the key on top; its weight is in bytes."""
        left = self._segment_of.get(key)
        if left is not None:
            self._held[left] -= self._segments[left].pop(key)
        self._push(0, key, weight)
        if len(self._segment_of) > self._most:
            self._forget_oldest()
        # A segment that is too full hands its oldest keys down; one that is not leaves those below as they were.
        for number, segment in enumerate(self._segments):
            if self._held[number] <= self._room[number]:
                return
            while self._held[number] > self._room[number]:
                moved, size = segment.popitem(last=False)
                self._held[number] -= size
                if number + 1 == len(self._segments):
                    del self._segment_of[moved]
                else:
                    self._push(number + 1, moved, size)

    def _forget_oldest(self) -> None:
        number = max(number for number, segment in enumerate(self._segments) if segment)
        key, size = self._segments[number].popitem(last=False)
        self._held[number] -= size
        del self._segment_of[key]

    def __len__(self) -> int:
        return len(self._segment_of)

    def _push(self, number: int, key: Hashable, weight: int) -> None:
        self._segments[number][key] = weight
        self._held[number] += weight
        self._segment_of[key] = number
