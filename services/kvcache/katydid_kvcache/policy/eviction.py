"""What an eviction policy is, and the four there are.

A tier keeps one policy for each slot size and pool of tenants. LRU is the default: with adaptive admission it is at or
near the best on public traces. LFU is the worst of them on most and offered for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol, TypeVar

from katydid_kvcache.policy.arc import Arc
from katydid_kvcache.policy.lfu import Lfu
from katydid_kvcache.policy.lru import Lru
from katydid_kvcache.policy.s3fifo import S3Fifo

__all__ = ["EVICTIONS", "Eviction", "new_eviction"]

Item = TypeVar("Item", bound=Hashable)

EVICTIONS = ("lru", "lfu", "arc", "s3fifo")
"""Names of the policies."""


class Eviction(Protocol[Item]):
    """Decides which of the items in it goes first. Weights are bytes; every item is in it at most once."""

    def insert(self, item: Item, weight: int = 1, *, guest: bool = False) -> None:
        """Add an item that is not in it; a `guest` was not admitted and is to go before all others."""

    def touch(self, item: Item) -> None:
        """The item was used. Nothing happens when it is not in it."""

    def settle(self, items: Sequence[Item]) -> None:
        """These follow each other in a chain: where nothing else tells them apart, the last is to go first."""

    def discard(self, item: Item) -> None:
        """Take an item out, and forget it. Nothing happens when it is not in it."""

    def pop(self) -> Item | None:
        """Take out the item that is to go; None when empty. The policy may remember its key."""

    def __iter__(self) -> Iterator[Item]:
        """The items, roughly in the order in which they would go."""

    def __contains__(self, item: object) -> bool: ...

    def __len__(self) -> int: ...


def new_eviction(name: str, key: Callable[[Item], Hashable]) -> Eviction[Item]:
    """An empty policy of that name; `key` names an item to those that remember what they evicted."""
    if name == "lru":
        return Lru()
    if name == "lfu":
        return Lfu()
    if name == "arc":
        return Arc(key)
    if name == "s3fifo":
        return S3Fifo(key)
    raise ValueError(f"no eviction policy {name!r}; there are {', '.join(EVICTIONS)}")
