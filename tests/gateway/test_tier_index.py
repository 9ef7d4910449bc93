"""What the cache service holds, by instance and tier, against plain sets; and within its bound."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_gateway.routing.tier_index import CacheTier, TierIndex, TierRun

BLOCKS = [bytes([number]) * 32 for number in range(8)]
SETS = st.lists(st.sampled_from(BLOCKS), max_size=4)
INSTANCES = ("host-a", "host-b")
PLACES = st.tuples(st.sampled_from(INSTANCES), st.sampled_from(list(CacheTier)))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["stored", "removed", "cleared"]), PLACES, SETS), max_size=30),
    st.permutations(BLOCKS),
    st.integers(0, 8),
    st.sampled_from(["", "host-a", "host-b", "host-c"]),
)
def test_equals_a_model_of_sets(
    operations: list[tuple[str, tuple[str, CacheTier], list[bytes]]], chain: list[bytes], start: int, near: str
) -> None:
    index = TierIndex()
    held: dict[bytes, set[tuple[str, CacheTier]]] = {block: set() for block in BLOCKS}
    for name, (instance, tier), blocks in operations:
        if name == "cleared":
            index.cleared(instance)
            for places in held.values():
                places -= {(instance, each) for each in CacheTier}
            continue
        getattr(index, name)(instance, tier, blocks)
        for block in blocks:
            (held[block].add if name == "stored" else held[block].discard)((instance, tier))
    met = {instance for _, (instance, _), _ in operations}
    expected = []
    for block in chain[start:]:
        if not held[block]:
            break
        own = [tier for instance, tier in held[block] if instance == near or near not in met]
        expected.append(min(own, default=CacheTier.SHARED))
    runs = [TierRun(tier, len(list(group))) for tier, group in groupby(expected)]
    assert index.runs(chain, start, near) == runs
    assert len(index) == sum(1 for places in held.values() if places)


def test_what_another_host_holds_costs_what_the_network_costs() -> None:
    index = TierIndex()
    index.stored("host-a", CacheTier.MEMORY, BLOCKS[:4])
    index.stored("host-b", CacheTier.DISK, BLOCKS[2:6])
    assert index.runs(BLOCKS, 0, "host-a") == [TierRun(CacheTier.MEMORY, 4), TierRun(CacheTier.SHARED, 2)]
    assert index.runs(BLOCKS, 0, "host-b") == [TierRun(CacheTier.SHARED, 2), TierRun(CacheTier.DISK, 4)]
    assert index.runs(BLOCKS, 0) == [TierRun(CacheTier.MEMORY, 4), TierRun(CacheTier.DISK, 2)]


def test_an_instance_that_is_away_takes_nothing_of_the_others_along() -> None:
    index = TierIndex()
    index.stored("host-a", CacheTier.MEMORY, BLOCKS[:4])
    index.stored("host-b", CacheTier.MEMORY, BLOCKS[:2])
    index.cleared("host-a")
    assert index.runs(BLOCKS, 0, "host-b") == [TierRun(CacheTier.MEMORY, 2)]
    assert len(index) == 2


def test_a_shared_store_larger_than_the_index_stays_within_its_bound() -> None:
    index = TierIndex(capacity_bytes=240 * 100)
    wanted = [b"w" * 31 + bytes([number]) for number in range(10)]
    index.stored("host-a", CacheTier.SHARED, wanted)
    for number in range(50):
        index.touch(wanted)
        index.stored("host-a", CacheTier.DISK, [bytes([number, place]) * 16 for place in range(20)])
        assert index.size_bytes <= 240 * 100
    assert index.runs(wanted, 0) == [TierRun(CacheTier.SHARED, 10)]
    assert len(index) == 100
