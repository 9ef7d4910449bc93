"""Ghosts against caches that really hold what the ghosts only remember."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_kvcache.policy.admission import ADMISSIONS, new_admission
from katydid_kvcache.policy.ghosts import Ghosts
from katydid_kvcache.policy.reuse_stack import ReuseStack

CHAINS = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), min_size=1, max_size=40)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 12), max_size=80))
def test_a_stack_holds_what_lru_caches_of_its_sizes_hold(touches: list[int]) -> None:
    sizes = (2, 3, 7)
    stack = ReuseStack(sizes)
    used: list[int] = []
    for key in touches:
        stack.touch(key, 1)
        used = [key, *(other for other in used if other != key)][: sizes[-1]]
        for other in range(13):
            at = used.index(other) if other in used else sizes[-1]
            assert stack.depth(other) == sum(at >= size for size in sizes)
        assert len(stack) == len(used)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 50)), max_size=80))
def test_a_stack_never_holds_more_bytes_than_its_sizes(touches: list[tuple[int, int]]) -> None:
    sizes = (40, 80, 160)
    stack = ReuseStack(sizes)
    weights: dict[int, int] = {}
    for key, weight in touches:
        stack.touch(key, weight)
        weights[key] = weight
        for number, size in enumerate(sizes):
            held = [other for other in weights if stack.depth(other) <= number]
            assert sum(weights[other] for other in held) <= size


@settings(max_examples=50)
@given(CHAINS)
def test_hit_rates_are_those_of_real_caches(chains: list[list[int]]) -> None:
    """For each size an LRU cache that admits all, and one that admits what came back, beside the ghosts."""
    ghosts = Ghosts(4)
    sizes = (2, 4, 8, 16)
    seen: list[int] = []
    caches: dict[tuple[str, int], list[int]] = {(rule, size): [] for rule in ("all", "second") for size in sizes}
    hits = dict.fromkeys(caches, 0.0)
    asked = 0.0
    for chain in chains:
        asked = asked * (1 - 1 / 200) + len(chain)
        for name, cache in caches.items():
            prefix = next((at for at, key in enumerate(chain) if key not in cache), len(chain))
            hits[name] = hits[name] * (1 - 1 / 200) + prefix
        for key in reversed(chain):
            remembered = key in seen or key in caches["second", 16]
            for (rule, size), cache in caches.items():
                if key in cache:
                    cache.remove(key)
                elif rule == "second" and not remembered:
                    continue
                cache.insert(0, key)
                del cache[size:]
            seen = [key, *(other for other in seen if other != key)][:16]
        ghosts.observe(chain, 1)
    for point in ghosts.hit_rates():
        assert point.admit_all == pytest.approx(hits["all", point.capacity_bytes] / asked)
        assert point.second_touch == pytest.approx(hits["second", point.capacity_bytes] / asked)
    for key in range(31):
        assert ghosts.returned(key) == (key in caches["second", 16])
    assert ghosts.second_touch_is_better == (hits["second", 4] > hits["all", 4])


def test_rules() -> None:
    ghosts = Ghosts(4)
    rules = {name: new_admission(name, ghosts) for name in ADMISSIONS}
    assert {name: rule("a") for name, rule in rules.items()} == {"all": True, "second_touch": False, "adaptive": True}
    # Pairs that come back between passing strangers: a cache that admits the strangers forgets the pair.
    for round_number in range(8):
        ghosts.observe(["pair", "its"], 1)
        ghosts.observe([("stranger", round_number, at) for at in range(5)], 1)
    assert ghosts.second_touch_is_better
    assert {name: rule("pair") for name, rule in rules.items()} == dict.fromkeys(ADMISSIONS, True)
    assert {name: rule("new") for name, rule in rules.items()} == {
        "all": True,
        "second_touch": False,
        "adaptive": False,
    }
    with pytest.raises(ValueError, match="all, second_touch, adaptive"):
        new_admission("never", ghosts)


@given(st.lists(st.integers(0, 12), max_size=60), st.integers(1, 8))
def test_a_stack_forgets_what_was_used_longest_ago_beyond_so_many_keys(touches: list[int], most: int) -> None:
    stack = ReuseStack((3, 100), most)
    used: list[int] = []
    for key in touches:
        stack.touch(key, 1)
        used = [key, *(other for other in used if other != key)][:most]
        assert {other for other in range(13) if stack.depth(other) < 2} == set(used)
        assert len(stack) == len(used)
