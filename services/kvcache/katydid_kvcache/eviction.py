"""Which block goes when a tier is full.

A policy is a plain class with `insert`, `touch`, `discard`, `pop` and iteration from the coldest on; a tier keeps one
for each slot size. LRU is the one offered: among the classical policies it is never far from the best on public
traces, while plain LFU is the worst on most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["Lru"]

Item = TypeVar("Item", bound=Hashable)


class Lru(Generic[Item]):
    """Least recently used first. All operations are O(1)."""

    def __init__(self) -> None:
        self._items: OrderedDict[Item, None] = OrderedDict()

    def insert(self, item: Item) -> None:
        """Add as the warmest; an item that is there already becomes the warmest."""
        self._items[item] = None
        self._items.move_to_end(item)

    def touch(self, item: Item) -> None:
        """Make the warmest, if it is there."""
        if item in self._items:
            self._items.move_to_end(item)

    def discard(self, item: Item) -> None:
        self._items.pop(item, None)

    def pop(self) -> Item | None:
        """Take out the coldest; None when empty."""
        return self._items.popitem(last=False)[0] if self._items else None

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __len__(self) -> int:
        return len(self._items)
