"""Placement over instances: agreement, minimal movement, balance and bounded load, on random sets."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from katydid_cache.placement import pick, rank, run_starts

NAMES = st.lists(st.integers(0, 10_000).map(lambda n: f"10.0.{n % 256}.{n // 256}:7301"), min_size=1, unique=True)
RUN = st.binary(min_size=32, max_size=32)


@given(RUN, NAMES, st.randoms())
def test_all_clients_agree_whatever_the_order_they_know_instances_in(run: bytes, names: list[str], chance) -> None:
    shuffled = names[:]
    chance.shuffle(shuffled)
    assert rank(run, shuffled) == rank(run, names)
    assert sorted(rank(run, names)) == sorted(names)


@given(RUN, NAMES, st.integers(20_000, 30_000))
def test_who_joins_takes_its_place_and_nobody_else_moves(run: bytes, names: list[str], number: int) -> None:
    newcomer = f"10.1.0.{number}:7301"
    after = rank(run, [*names, newcomer])
    assert [name for name in after if name != newcomer] == rank(run, names)


def test_load_is_even_and_a_newcomer_takes_its_share() -> None:
    runs = [number.to_bytes(32, "big") for number in range(4000)]
    names = [f"host-{number}:7301" for number in range(8)]
    before = {run: rank(run, names)[0] for run in runs}
    after = {run: rank(run, [*names, "host-new:7301"])[0] for run in runs}
    homes = Counter(before.values())
    assert max(homes.values()) < 1.15 * len(runs) / len(names)
    moved = [run for run in runs if before[run] != after[run]]
    assert {after[run] for run in moved} == {"host-new:7301"}
    assert 0.8 < len(moved) / (len(runs) / 9) < 1.2
    seconds = Counter(rank(run, names)[1] for run in runs if before[run] == names[0])
    assert len(seconds) == 7, "what an instance leaves behind falls to all others"


@given(NAMES, st.integers(1, 200), st.floats(1.05, 3.0))
def test_nobody_carries_more_than_the_bound(names: list[str], runs: int, bound: float) -> None:
    load: Counter[str] = Counter()
    for number in range(runs):
        load[pick(rank(number.to_bytes(32, "big"), names), load, bound=bound, more=1.0)] += 1
    # A unit is indivisible, and the last one may have been placed when the total was the present one.
    assert max(load.values()) <= max(1.0, bound * runs / len(names) + 1)
    assert sum(load.values()) == runs


def test_home_is_kept_while_it_is_not_overloaded() -> None:
    ranked = ["a:1", "b:1", "c:1"]
    assert pick(ranked, {}) == "a:1"
    assert pick(ranked, {"a:1": 4.0, "b:1": 4.0, "c:1": 4.0}, more=0.5) == "a:1"
    assert pick(ranked, {"a:1": 9.0, "b:1": 4.0, "c:1": 4.0}, more=1.0) == "b:1"


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 130))
def test_runs_partition_a_chain_at_the_same_blocks_wherever_a_client_begins(
    offset: int, count: int, run_blocks: int
) -> None:
    runs = run_starts(offset, count, run_blocks)
    assert [place for run in runs for place in run] == list(range(count))
    for run in runs:
        assert len({(offset + place) // run_blocks for place in run}) == 1
    assert len(runs) == len({(offset + place) // run_blocks for place in range(count)})


def test_nobody_is_overloaded_with_less_than_the_slack() -> None:
    ranked = ["a:1", "b:1"]
    assert pick(ranked, {"a:1": 9.0}, more=1.0) == "b:1"
    assert pick(ranked, {"a:1": 9.0}, more=1.0, slack=10.0) == "a:1"


def test_what_is_too_much_for_all_goes_to_who_carries_least() -> None:
    assert pick(["a:1", "b:1"], {"a:1": 2.0, "b:1": 1.0}, more=100.0) == "b:1"
    assert pick(["a:1", "b:1", "c:1"], {"a:1": 1.0}, more=100.0) == "b:1", "of equals the first in rank"


def test_ranks_are_the_same_for_clients_of_every_version() -> None:
    assert rank(bytes(range(32)), ["host-a:7301", "host-b:7301", "host-c:7301", "[::1]:7301"]) == [
        "host-a:7301",
        "host-c:7301",
        "[::1]:7301",
        "host-b:7301",
    ]
