"""Answers of several instances put together, against a plain model of who has which block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from katydid_cache.answers import Answer, join, missing
from katydid_cache.placement import run_starts
from katydid_cache.records import LookupResult, Tier, TierRun


def lookup(blocks: int, tier: Tier = Tier.MEMORY) -> LookupResult:
    return LookupResult(blocks, (TierRun(tier, blocks, 0.1),) if blocks else (), lease=1)


@given(st.data(), st.integers(1, 40), st.integers(1, 8), st.integers(0, 20))
def test_the_prefix_is_what_somebody_has_of_each_run_up_to_the_first_gap(
    data: st.DataObject, count: int, run_blocks: int, offset: int
) -> None:
    runs = run_starts(offset, count, run_blocks)
    homes = {run: data.draw(st.sampled_from("abc")) for run in runs}
    held = {name: data.draw(st.sets(st.integers(0, count - 1))) for name in "abc"}
    answers = []
    for name in "abc":
        own = [run for run in runs if homes[run] == name]
        chain = [place for run in own for place in run]
        found = next((at for at, place in enumerate(chain) if place not in held[name]), len(chain))
        if own:
            answers.append(Answer(name, own, lookup(found)))
    expected: list[str] = []
    for run in runs:
        name = homes[run]
        # What it has behind a gap of its own part of the chain it does not tell.
        reached = True
        for place in (place for other in runs if homes[other] == name for place in other):
            if place == run.start:
                break
            reached = reached and place in held[name]
        have = 0
        while reached and have < len(run) and run.start + have in held[name]:
            have += 1
        expected += [name] * have
        if have < len(run):
            break
    prefix = join(runs, answers)
    assert list(prefix.owners) == expected
    assert sum(run.blocks for run in prefix.runs) == prefix.blocks == len(expected)


def test_the_better_of_two_answers_counts_and_tiers_are_merged() -> None:
    runs = run_starts(0, 6, 3)
    home = Answer("a", runs, LookupResult(4, (TierRun(Tier.MEMORY, 2, 0.0), TierRun(Tier.DISK, 2, 0.3)), 7))
    second = Answer("b", [runs[1]], lookup(3, Tier.DISK))
    prefix = join(runs, [home, second])
    assert prefix.owners == ("a", "a", "a", "b", "b", "b")
    assert prefix.runs == (TierRun(Tier.MEMORY, 2, 0.0), TierRun(Tier.DISK, 4, 0.3))
    assert join(runs, [second]).blocks == 0, "without its beginning a chain is of no use"


def test_missing_names_runs_without_a_first_block() -> None:
    runs = run_starts(0, 9, 3)
    answers = [Answer("a", [runs[0], runs[2]], lookup(4)), Answer("b", [runs[1]], lookup(0))]
    assert missing(runs, answers) == [runs[1]]
    assert missing(runs, []) == runs
