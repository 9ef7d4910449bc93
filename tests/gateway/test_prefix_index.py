"""The picture of who holds what, against a plain model of sets and against the clock."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.routing.prefix_index import PREDICTION_S, Holder, PrefixIndex

HOLDERS = [Holder("a", 0), Holder("a", 1), Holder("b", 0)]
BLOCKS = [bytes([number]) * 32 for number in range(8)]
SETS = st.lists(st.sampled_from(BLOCKS), max_size=4)
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["stored", "removed", "cleared", "predict", "wait"]), st.sampled_from(HOLDERS), SETS),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(OPERATIONS, st.permutations(BLOCKS))
def test_equals_a_model_of_sets(operations: list[tuple[str, Holder, list[bytes]]], chain: list[bytes]) -> None:
    index = PrefixIndex()
    held: dict[Holder, set[bytes]] = {}
    predicted: dict[tuple[Holder, bytes], float] = {}
    now = 0.0
    for name, holder, blocks in operations:
        if name == "wait":
            now += PREDICTION_S * 0.6
            continue
        own = held.setdefault(holder, set())
        if name == "stored":
            index.stored(holder, blocks)
            own.update(blocks)
        elif name == "removed":
            index.removed(holder, blocks)
            own.difference_update(blocks)
            for block in blocks:
                predicted.pop((holder, block), None)
        elif name == "cleared":
            index.cleared(holder)
            own.clear()
            predicted = {key: until for key, until in predicted.items() if key[0] != holder}
        else:
            index.predict(holder, blocks, now)
            predicted |= {(holder, block): now + PREDICTION_S for block in blocks if block not in own}
        index.check_integrity()
    believed = {
        holder: own | {block for (who, block), until in predicted.items() if who == holder and until > now}
        for holder, own in held.items()
    }
    expected = {
        holder: next((place for place, block in enumerate(chain) if block not in own), len(chain))
        for holder, own in believed.items()
    }
    assert index.depths(chain, now) == expected
    index.check_integrity()
    assert {holder: index.blocks(holder) for holder in held} == {holder: len(own) for holder, own in held.items()}


def test_a_prediction_runs_out_unless_it_is_renewed_or_confirmed() -> None:
    index = PrefixIndex()
    home = HOLDERS[0]
    index.predict(home, BLOCKS[:3], 0.0)
    index.predict(home, BLOCKS[:1], 5.0)
    index.stored(home, BLOCKS[1:2])
    assert index.depths(BLOCKS, 9.9)[home] == 3
    assert index.depths(BLOCKS, 10.1)[home] == 2
    assert index.depths(BLOCKS[1:], 15.1)[home] == 1
    assert index.depths(BLOCKS, 15.1)[home] == 0


def test_what_is_known_is_not_predicted_too() -> None:
    """Predictions have a quarter of the memory; those of warm prompts would drive out those that tell something."""
    index = PrefixIndex()
    index.stored(HOLDERS[0], BLOCKS[:3])
    before = index.size_bytes
    index.predict(HOLDERS[0], BLOCKS[:3], 0.0)
    assert index.size_bytes == before
    index.predict(HOLDERS[1], BLOCKS[:3], 0.0)
    assert index.size_bytes > before


def test_only_leading_blocks_count() -> None:
    index = PrefixIndex()
    index.stored(HOLDERS[0], [BLOCKS[0], BLOCKS[2]])
    assert index.depths(BLOCKS[:3], 0.0)[HOLDERS[0]] == 1
    assert index.depths([], 0.0)[HOLDERS[0]] == 0


def _hashes(start: int, count: int) -> list[bytes]:
    return [number.to_bytes(32, "little") for number in range(start, start + count)]


def test_a_day_of_unique_prompts_stays_within_its_bound() -> None:
    """A tree that only grows ends its gateway."""
    index = PrefixIndex(capacity_bytes=2_000_000)
    for number in range(400):
        prompt = _hashes(1000 * number, 300)
        index.predict(HOLDERS[number % 3], prompt, float(number))
        if number % 2:
            index.stored(HOLDERS[number % 3], prompt)
        assert index.size_bytes <= 2_000_000
    index.check_integrity()
    assert index.size_bytes > 0.9 * 2_000_000, "what is forgotten makes room, no more"


def test_the_memory_counted_is_the_memory_taken() -> None:
    def growth(fill: Callable[[PrefixIndex], None]) -> tuple[int, int]:
        gc.collect()
        tracemalloc.start()
        index = PrefixIndex()
        # Integers of many holders are objects of their own.
        for number in range(12):
            index.stored(Holder("e", number), [])
        fill(index)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak, index.size_bytes

    last = Holder("e", 11)
    for fill in (
        lambda index: index.stored(last, _hashes(0, 22_000)),
        lambda index: index.predict(last, _hashes(0, 22_000), 0.0),
    ):
        taken, counted = growth(fill)
        assert taken <= counted * 1.3
        assert taken > counted * 0.4


def test_what_prompts_want_outlives_what_nobody_asked_for_again() -> None:
    """One tenant's unique prompts must not drive out what everybody shares."""
    index = PrefixIndex(capacity_bytes=1_000_000)
    shared = _hashes(10**9, 50)
    index.stored(HOLDERS[0], shared)
    for number in range(100):
        index.touch(shared)
        index.stored(HOLDERS[1], _hashes(1000 * number, 200))
    assert index.depths(shared, 0.0)[HOLDERS[0]] == 50
    index.check_integrity()


def test_a_prefix_outlives_what_depends_on_it() -> None:
    index = PrefixIndex(capacity_bytes=240 * 150)
    first = _hashes(0, 100)
    index.stored(HOLDERS[0], first)
    index.stored(HOLDERS[0], _hashes(1000, 100))
    assert index.depths(first, 0.0)[HOLDERS[0]] == 50
