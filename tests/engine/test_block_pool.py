"""The block pool against a model: nothing leaks, nothing is used twice, a suffix goes before its prefix."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from katydid_engine.block_pool import BlockPool, IntegrityError, OutOfPages

NUM_PAGES = 8


def block_hash(chain: tuple[int, ...]) -> bytes:
    return bytes(chain).ljust(32, b"\xff")


class PoolMachine(RuleBasedStateMachine):
    """Holders of chains. A chain is a tuple of small numbers; its prefixes name its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_PAGES)
        self.holders: list[tuple[tuple[int, ...], list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}
        self.watched: set[bytes] = set()

    @rule(chain=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple))
    def admit(self, chain: tuple[int, ...]) -> None:
        prefixes = [chain[: i + 1] for i in range(len(chain))]
        matched = self.pool.match([block_hash(prefix) for prefix in prefixes])
        for page, prefix in zip(matched, prefixes, strict=False):
            assert self.content[page] == prefix, "a hit on another chain's page"
        missing = len(chain) - len(matched)
        available = self.pool.num_available - self.pool.count_unreferenced(matched)
        self.pool.acquire(matched)
        if missing > available:
            with pytest.raises(OutOfPages):
                self.pool.allocate(missing)
            self.pool.release(matched)
            return
        fresh = self.pool.allocate(missing)
        held = {page for _, pages in self.holders for page in pages} | set(matched)
        assert not held & set(fresh), "a page in use was given out"
        pages = matched + fresh
        for index in range(len(matched), len(chain)):
            page = self.pool.publish(pages[index], block_hash(prefixes[index]))
            assert page == pages[index]
            self.content[page] = prefixes[index]
        self.holders.append((chain, pages))

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 100))
    def leave(self, pick: int) -> None:
        _, pages = self.holders.pop(pick % len(self.holders))
        self.pool.release(pages)

    @rule()
    def flush(self) -> None:
        held = {page for _, pages in self.holders for page in pages}
        cached = self.pool.num_cached
        assert self.pool.flush() == cached - len(held)
        assert self.pool.num_cached == len(held)

    @invariant()
    def books(self) -> None:
        self.pool.check_integrity()
        self.pool.check_references([page for _, pages in self.holders for page in pages])
        self.take_events()
        assert self.watched == set(self.pool.cached_hashes()), "events and cache disagree"
        for cached in self.watched:
            chain = tuple(cached.rstrip(b"\xff"))
            assert len(chain) == 1 or block_hash(chain[:-1]) in self.watched, "a block outlived its prefix"

    def take_events(self) -> None:
        events = self.pool.take_events()
        assert not set(events.stored) & self.watched
        self.watched -= set(events.removed)
        self.watched |= set(events.stored)


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_the_least_recently_released_goes_first() -> None:
    pool = BlockPool(3)
    pages = pool.allocate(3)
    for page, name in zip(pages, "abc", strict=True):
        pool.publish(page, name.encode() * 32)
    pool.release([pages[1]])
    pool.release([pages[0]])
    pool.release([pages[2]])
    pool.acquire(pool.match([b"b" * 32]))
    pool.release([pages[1]])
    assert pool.allocate(3) == [pages[0], pages[2], pages[1]]


def test_a_block_held_twice_is_offered_the_first_holder() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.publish(first, b"x" * 32) == first
    assert pool.publish(second, b"x" * 32) == first
    assert pool.hash_of(second) is None


def test_misuse_is_an_integrity_error() -> None:
    pool = BlockPool(2)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(IntegrityError, match="released more often"):
        pool.release([page])
    pool = BlockPool(2)
    with pytest.raises(IntegrityError, match="cannot be published"):
        pool.publish(0, b"x" * 32)
    pool.allocate(1)
    with pytest.raises(IntegrityError, match="counts 1 references, 0 are held"):
        pool.check_references([])
    with pytest.raises(ValueError, match="num_pages=0"):
        BlockPool(0)
