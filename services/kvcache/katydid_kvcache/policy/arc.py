"""ARC: items used once and items used more often in two lists, whose sizes follow what was evicted too early.

After Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, with weights. The cache's size
is not told: it is the weight held when something has to go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from typing import Generic, TypeVar

__all__ = ["Arc"]

Item = TypeVar("Item", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


class _Queue(Generic[Key]):
    """Keys with weights, oldest first, and the sum of the weights."""

    def __init__(self) -> None:
        self.weights: OrderedDict[Key, int] = OrderedDict()
        self.total = 0

    def add(self, key: Key, weight: int) -> None:
        self.weights[key] = weight
        self.total += weight

    def remove(self, key: Key) -> int:
        weight = self.weights.pop(key)
        self.total -= weight
        return weight

    def oldest(self) -> Key:
        return next(iter(self.weights))


class Arc(Generic[Item]):
    """An `Eviction`. `key` names an item after it has gone."""

    def __init__(self, key: Callable[[Item], Hashable]) -> None:
        self._key = key
        self._once: _Queue[Item] = _Queue()
        self._often: _Queue[Item] = _Queue()
        self._gone_once: _Queue[Hashable] = _Queue()
        self._gone_often: _Queue[Hashable] = _Queue()
        self._size = 0
        self._once_target = 0.0

    def insert(self, item: Item, weight: int = 1, *, guest: bool = False) -> None:
        key, once, often = self._key(item), self._gone_once, self._gone_often
        if key in once.weights:
            step = max(1.0, often.total / once.total)
            self._once_target = min(float(self._size), self._once_target + step * once.remove(key))
            self._often.add(item, weight)
        elif key in often.weights:
            step = max(1.0, once.total / often.total)
            self._once_target = max(0.0, self._once_target - step * often.remove(key))
            self._often.add(item, weight)
        else:
            self._once.add(item, weight)
            if guest:
                self._once.weights.move_to_end(item, last=False)

    def touch(self, item: Item) -> None:
        if item in self._once.weights:
            self._often.add(item, self._once.remove(item))
        elif item in self._often.weights:
            self._often.weights.move_to_end(item)

    def settle(self, items: Sequence[Item]) -> None:
        for item in reversed(items):
            for queue in (self._once, self._often):
                if item in queue.weights:
                    queue.weights.move_to_end(item)

    def discard(self, item: Item) -> None:
        for queue in (self._once, self._often):
            if item in queue.weights:
                queue.remove(item)

    def pop(self) -> Item | None:
        if not len(self):
            return None
        self._size = self._once.total + self._often.total
        if self._once.weights and (self._once.total > self._once_target or not self._often.weights):
            return self._send(self._once, self._gone_once)
        return self._send(self._often, self._gone_often)

    def __iter__(self) -> Iterator[Item]:
        return chain(self._once.weights, self._often.weights)

    def __contains__(self, item: object) -> bool:
        return item in self._once.weights or item in self._often.weights

    def __len__(self) -> int:
        return len(self._once.weights) + len(self._often.weights)

    def _send(self, queue: _Queue[Item], gone: _Queue[Hashable]) -> Item:
        item = queue.oldest()
        gone.add(self._key(item), queue.remove(item))
        # What is remembered of each list and what is in it weigh no more than the cache, together twice as much.
        while self._gone_once.weights and self._once.total + self._gone_once.total > self._size:
            self._gone_once.remove(self._gone_once.oldest())
        while self._gone_often.weights and self._gone_once.total + self._gone_often.total > self._size:
            self._gone_often.remove(self._gone_often.oldest())
        return item
