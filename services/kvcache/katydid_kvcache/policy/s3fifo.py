"""S3-FIFO: a small queue that new items must survive, a main queue, and the keys of those that did not survive.

After Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023, with weights. The
cache's size is not told: it is the weight held when something has to go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from typing import Generic, TypeVar

__all__ = ["S3Fifo"]

Item = TypeVar("Item", bound=Hashable)

_SMALL_SHARE = 0.1
_MOST_USES = 3


class S3Fifo(Generic[Item]):
    """An `Eviction`. `key` names an item after it has gone."""

    def __init__(self, key: Callable[[Item], Hashable]) -> None:
        self._key = key
        self._small: OrderedDict[Item, None] = OrderedDict()
        self._main: OrderedDict[Item, None] = OrderedDict()
        self._uses: dict[Item, int] = {}
        self._weights: dict[Item, int] = {}
        self._small_weight = 0
        self._main_weight = 0
        self._gone: OrderedDict[Hashable, int] = OrderedDict()
        self._gone_weight = 0

    def insert(self, item: Item, weight: int = 1, *, guest: bool = False) -> None:
        self._uses[item] = 0
        self._weights[item] = weight
        remembered = self._gone.pop(self._key(item), None)
        if remembered is not None:
            self._gone_weight -= remembered
            self._main[item] = None
            self._main_weight += weight
            return
        self._small[item] = None
        self._small_weight += weight
        if guest:
            self._small.move_to_end(item, last=False)

    def touch(self, item: Item) -> None:
        if item in self._uses:
            self._uses[item] = min(self._uses[item] + 1, _MOST_USES)

    def settle(self, items: Sequence[Item]) -> None:
        for item in reversed(items):
            for queue in (self._small, self._main):
                if item in queue and not self._uses[item]:
                    queue.move_to_end(item)

    def discard(self, item: Item) -> None:
        if item in self._uses:
            self._leave(item)

    def pop(self) -> Item | None:
        while self._uses:
            if self._small and (
                not self._main or self._small_weight >= _SMALL_SHARE * (self._small_weight + self._main_weight)
            ):
                item = next(iter(self._small))
                if not self._uses[item]:
                    self._remember(item)
                    self._leave(item)
                    return item
                weight = self._weights[item]
                self._leave(item)
                self._uses[item], self._weights[item], self._main[item] = 0, weight, None
                self._main_weight += weight
            else:
                item = next(iter(self._main))
                if not self._uses[item]:
                    self._leave(item)
                    return item
                self._uses[item] -= 1
                self._main.move_to_end(item)
        return None

    def __iter__(self) -> Iterator[Item]:
        return chain(self._small, self._main)

    def __contains__(self, item: object) -> bool:
        return item in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def _leave(self, item: Item) -> None:
        weight = self._weights.pop(item)
        del self._uses[item]
        if item in self._small:
            del self._small[item]
            self._small_weight -= weight
        else:
            del self._main[item]
            self._main_weight -= weight

    def _remember(self, item: Item) -> None:
        weight = self._weights[item]
        self._gone[self._key(item)] = weight
        self._gone_weight += weight
        while self._gone_weight > self._small_weight + self._main_weight:
            self._gone_weight -= self._gone.popitem(last=False)[1]
