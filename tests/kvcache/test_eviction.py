"""The eviction policies against models written as plain lists, straight from their descriptions."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_kvcache.policy.eviction import EVICTIONS, new_eviction

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["insert", "guest", "touch", "discard", "pop", "pop", "settle"]), st.integers(0, 8)),
    max_size=60,
)


class Model(Protocol):
    def insert(self, item: int, guest: bool) -> None: ...
    def touch(self, item: int) -> None: ...
    def discard(self, item: int) -> None: ...
    def settle(self, items: list[int]) -> None: ...
    def pop(self) -> int | None: ...
    def items(self) -> list[int]: ...


class LruModel:
    def __init__(self) -> None:
        self.order: list[int] = []

    def insert(self, item: int, guest: bool) -> None:
        self.order.insert(0 if guest else len(self.order), item)

    def touch(self, item: int) -> None:
        if item in self.order:
            self.order.remove(item)
            self.order.append(item)

    def discard(self, item: int) -> None:
        if item in self.order:
            self.order.remove(item)

    def settle(self, items: list[int]) -> None:
        for item in items[::-1]:
            self.touch(item)

    def pop(self) -> int | None:
        return self.order.pop(0) if self.order else None

    def items(self) -> list[int]:
        return self.order


class LfuModel:
    """A list in order of last use, and a count for each."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.order: list[int] = []

    def insert(self, item: int, guest: bool) -> None:
        self.counts[item] = 0 if guest else 1
        self.order.append(item)

    def touch(self, item: int) -> None:
        if item in self.order:
            self.counts[item] += 1
            self.order.remove(item)
            self.order.append(item)

    def discard(self, item: int) -> None:
        if item in self.order:
            self.order.remove(item)

    def settle(self, items: list[int]) -> None:
        for item in items[::-1]:
            if item in self.order:
                self.order.remove(item)
                self.order.append(item)

    def pop(self) -> int | None:
        items = self.items()
        if not items:
            return None
        self.order.remove(items[0])
        return items[0]

    def items(self) -> list[int]:
        return sorted(self.order, key=lambda item: self.counts[item])


class ArcModel:
    """T1, T2, B1, B2 and p of the paper, oldest first; c is the number held when something is to go."""

    def __init__(self) -> None:
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0
        self.c = 0

    def insert(self, item: int, guest: bool) -> None:
        if item in self.b1:
            self.p = min(self.c, self.p + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(item)
            self.t2.append(item)
        elif item in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(item)
            self.t2.append(item)
        else:
            self.t1.insert(0 if guest else len(self.t1), item)

    def touch(self, item: int) -> None:
        if item in self.items():
            self.discard(item)
            self.t2.append(item)

    def discard(self, item: int) -> None:
        for queue in (self.t1, self.t2):
            if item in queue:
                queue.remove(item)

    def settle(self, items: list[int]) -> None:
        for item in items[::-1]:
            for queue in (self.t1, self.t2):
                if item in queue:
                    queue.remove(item)
                    queue.append(item)

    def pop(self) -> int | None:
        if not self.items():
            return None
        self.c = len(self.t1) + len(self.t2)
        if self.t1 and (len(self.t1) > self.p or not self.t2):
            item = self.t1.pop(0)
            self.b1.append(item)
        else:
            item = self.t2.pop(0)
            self.b2.append(item)
        while self.b1 and len(self.t1) + len(self.b1) > self.c:
            self.b1.pop(0)
        while self.b2 and len(self.b1) + len(self.b2) > self.c:
            self.b2.pop(0)
        return item

    def items(self) -> list[int]:
        return self.t1 + self.t2


class S3FifoModel:
    """S, M and G of the paper, oldest first, with a count of uses for each item held."""

    def __init__(self) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.uses: dict[int, int] = {}

    def insert(self, item: int, guest: bool) -> None:
        self.uses[item] = 0
        if item in self.ghost:
            self.ghost.remove(item)
            self.main.append(item)
        else:
            self.small.insert(0 if guest else len(self.small), item)

    def touch(self, item: int) -> None:
        if item in self.items():
            self.uses[item] = min(3, self.uses[item] + 1)

    def discard(self, item: int) -> None:
        for queue in (self.small, self.main):
            if item in queue:
                queue.remove(item)

    def settle(self, items: list[int]) -> None:
        for item in items[::-1]:
            for queue in (self.small, self.main):
                if item in queue and not self.uses[item]:
                    queue.remove(item)
                    queue.append(item)

    def pop(self) -> int | None:
        while self.items():
            if self.small and (not self.main or len(self.small) >= len(self.items()) / 10):
                item = self.small[0]
                if self.uses[item]:
                    self.main.append(self.small.pop(0))
                    self.uses[item] = 0
                    continue
                self.ghost.append(item)
                while len(self.ghost) > len(self.items()):
                    self.ghost.pop(0)
                return self.small.pop(0)
            item = self.main.pop(0)
            if not self.uses[item]:
                return item
            self.uses[item] -= 1
            self.main.append(item)
        return None

    def items(self) -> list[int]:
        return self.small + self.main


MODELS: dict[str, Callable[[], Model]] = {"lru": LruModel, "lfu": LfuModel, "arc": ArcModel, "s3fifo": S3FifoModel}


@pytest.mark.parametrize("name", EVICTIONS)
@settings(max_examples=50)
@given(operations=OPERATIONS, weight=st.sampled_from([1, 4096]))
def test_a_policy_does_what_its_description_says(name: str, operations: list[tuple[str, int]], weight: int) -> None:
    policy, model = new_eviction(name, lambda item: item), MODELS[name]()
    for operation, item in operations:
        if operation == "pop":
            assert policy.pop() == model.pop()
        elif operation in ("insert", "guest"):
            if item not in policy:
                policy.insert(item, weight, guest=operation == "guest")
                model.insert(item, operation == "guest")
        elif operation == "settle":
            chain = [item, item - 1, item - 3]
            policy.settle(chain)
            model.settle(chain)
        else:
            getattr(policy, operation)(item)
            getattr(model, operation)(item)
        assert list(policy) == model.items()
        assert len(policy) == len(model.items())
        assert all((item in policy) == (item in model.items()) for item in range(9))


@pytest.mark.parametrize("name", EVICTIONS)
def test_a_guest_goes_before_everything_that_was_admitted(name: str) -> None:
    policy = new_eviction(name, lambda item: item)
    for item in range(4):
        policy.insert(item)
    policy.insert(9, guest=True)
    assert policy.pop() == 9


def test_the_main_queue_of_s3fifo_gives_as_many_chances_as_uses() -> None:
    """With fewer than ten items the small queue is always the first to give: this takes twenty."""
    policy = new_eviction("s3fifo", lambda item: item)
    for item in range(20):
        policy.insert(item)
        policy.touch(item)
    assert policy.pop() == 0, "the small queue is a tenth, of the others the oldest goes"
    for item in (1, 1, 2):
        policy.touch(item)
    assert [policy.pop() for _ in range(19)] == [*range(3, 19), 2, 19, 1]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="lru, lfu, arc, s3fifo"):
        new_eviction("clock", lambda item: item)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", EVICTIONS)
def test_a_cache_of_changing_size_gives_up_what_the_description_says(name: str, seed: int) -> None:
    """Requests of a skewed and drifting popularity, long enough that what was evicted too early comes back."""
    chance = random.Random(seed)
    policy, model = new_eviction(name, lambda item: item), MODELS[name]()
    for request in range(2500):
        room = 12 + 8 * (request // 500 % 2)
        item = request // 250 + min(int(chance.paretovariate(0.7)), 60)
        if request % 1000 > 600:  # used twice, a little too far apart to be held for that long
            item = 1000 + request // 2 - chance.randint(12, 22) * (request % 2)
        if item in policy:
            for _ in range(chance.choice([1, 1, 4])):
                policy.touch(item)
                model.touch(item)
        else:
            while len(policy) >= room:
                assert policy.pop() == model.pop()
            guest = chance.random() < 0.1
            policy.insert(item, 4096, guest=guest)
            model.insert(item, guest)
        if chance.random() < 0.1:
            chain = [*range(item, item + 4)]
            policy.settle(chain)
            model.settle(chain)
    assert list(policy) == model.items()
