"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

__all__ = ["Lru"]

Item = TypeVar("Item", bound=Hashable)


class Lru(Generic[Item]):
    """An `Eviction`; all operations are O(1)."""

    def __init__(self) -> None:
        self._items: OrderedDict[Item, None] = OrderedDict()

    def insert(self, item: Item, weight: int = 1, *, guest: bool = False) -> None:  # noqa: ARG002
        self._items[item] = None
        if guest:
            self._items.move_to_end(item, last=False)

    def touch(self, item: Item) -> None:
        if item in self._items:
            self._items.move_to_end(item)

    def settle(self, items: Sequence[Item]) -> None:
        for item in reversed(items):
            self.touch(item)

    def discard(self, item: Item) -> None:
        self._items.pop(item, None)

    def pop(self) -> Item | None:
        return self._items.popitem(last=False)[0] if self._items else None

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __len__(self) -> int:
        return len(self._items)
