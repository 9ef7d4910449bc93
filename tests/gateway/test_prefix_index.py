"""The picture of who holds what, against a plain model of sets and against the clock."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.routing.prefix_index import (
    PREDICTION_S,
    CacheTier,
    Holder,
    PrefixIndex,
    TierIndex,
)

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


def test_only_leading_blocks_count() -> None:
    index = PrefixIndex()
    index.stored(HOLDERS[0], [BLOCKS[0], BLOCKS[2]])
    assert index.depths(BLOCKS[:3], 0.0)[HOLDERS[0]] == 1
    assert index.depths([], 0.0)[HOLDERS[0]] == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(list(CacheTier)), SETS), max_size=30),
    st.permutations(BLOCKS),
    st.integers(0, 8),
)
def test_tiers_equal_a_model(
    operations: list[tuple[bool, CacheTier, list[bytes]]], chain: list[bytes], start: int
) -> None:
    index = TierIndex()
    held: dict[bytes, set[CacheTier]] = {block: set() for block in BLOCKS}
    for stored, tier, blocks in operations:
        (index.stored if stored else index.removed)(tier, blocks)
        for block in blocks:
            (held[block].add if stored else held[block].discard)(tier)
    expected = []
    for block in chain[start:]:
        if not held[block]:
            break
        expected.append(min(held[block]))
    assert index.run(chain, start) == expected
    assert len(index) == sum(1 for tiers in held.values() if tiers)
