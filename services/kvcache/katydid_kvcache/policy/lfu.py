"""Least frequently used first; of equals, the one used longest ago. Counts are forgotten with the item."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

__all__ = ["Lfu"]

Item = TypeVar("Item", bound=Hashable)


class Lfu(Generic[Item]):
    """An `Eviction`; O(1) but for the search for the next count in use after a `pop` or `discard`."""

    def __init__(self) -> None:
        self._count: dict[Item, int] = {}
        self._by_count: dict[int, OrderedDict[Item, None]] = {}

    def insert(self, item: Item, weight: int = 1, *, guest: bool = False) -> None:  # noqa: ARG002
        self._put(item, 0 if guest else 1)

    def touch(self, item: Item) -> None:
        if item in self._count:
            count = self._count[item]
            self.discard(item)
            self._put(item, count + 1)

    def settle(self, items: Sequence[Item]) -> None:
        for item in reversed(items):
            if item in self._count:
                self._by_count[self._count[item]].move_to_end(item)

    def discard(self, item: Item) -> None:
        count = self._count.pop(item, None)
        if count is not None:
            equals = self._by_count[count]
            del equals[item]
            if not equals:
                del self._by_count[count]

    def pop(self) -> Item | None:
        if not self._count:
            return None
        item = next(iter(self._by_count[min(self._by_count)]))
        self.discard(item)
        return item

    def __iter__(self) -> Iterator[Item]:
        for count in sorted(self._by_count):
            yield from self._by_count[count]

    def __contains__(self, item: object) -> bool:
        return item in self._count

    def __len__(self) -> int:
        return len(self._count)

    def _put(self, item: Item, count: int) -> None:
        self._count[item] = count
        self._by_count.setdefault(count, OrderedDict())[item] = None
