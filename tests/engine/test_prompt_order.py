"""As many prompts as can be are in time, by an oracle that tries every set; nobody waits for ever."""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st
from katydid_engine.prompt_order import Due, in_time, in_turn, next_prompt

# Of these all sums are exact.
SIXTEENTHS = st.builds(Due, *(st.integers(*bounds).map(lambda x: x / 16) for bounds in ((1, 80), (-16, 96))))
DUES = st.lists(SIXTEENTHS, min_size=1, max_size=7)
TENTHS = st.builds(Due, *(st.integers(*bounds).map(lambda x: x / 10) for bounds in ((1, 50), (-10, 60))))


def feasible(prompts: list[Due], order: tuple[int, ...]) -> bool:
    ends = itertools.accumulate(prompts[index].work_s for index in order)
    return all(end <= prompts[index].left_s for end, index in zip(ends, order, strict=True))


@given(DUES)
def test_the_most_that_can_be_are_in_time(prompts: list[Due]) -> None:
    kept = in_time(prompts)
    assert feasible(prompts, tuple(kept))
    more = itertools.permutations(range(len(prompts)), len(kept) + 1)
    assert not any(feasible(prompts, order) for order in more)


@given(DUES, st.integers(0, 100))
def test_who_comes_next_makes_nobody_late(prompts: list[Due], turn: int) -> None:
    kept, chosen = in_time(prompts), next_prompt(prompts, turn)
    if chosen in kept:
        others = tuple(index for index in kept if index != chosen)
        assert any(feasible(prompts, (chosen, *order)) for order in itertools.permutations(others))
        assert all(
            prompts[chosen].work_s <= prompts[other].work_s
            or not any(feasible(prompts, (other, *order)) for order in itertools.permutations(set(kept) - {other}))
            for other in kept
        )
    else:
        assert chosen == min(set(range(len(prompts))) - set(kept)), "the oldest of those that are late in any case"


@given(st.lists(TENTHS, min_size=1, max_size=7), st.integers(0, 100))
@example([Due(1.1, 1.7), Due(1.2, 1.5), Due(0.6, 1.0)], 1).via("0.6 + 1.2 - 1.2 + 1.1 is 1.7, 0.6 + 1.1 is more")
def test_sums_that_round_up_leave_somebody_to_go_on_with(prompts: list[Due], turn: int) -> None:
    assert next_prompt(prompts, turn) in range(len(prompts))


@given(DUES)
def test_who_is_late_has_every_fourth_step(prompts: list[Due]) -> None:
    chosen = [next_prompt(prompts, turn) for turn in range(8)]
    late = set(range(len(prompts))) - set(in_time(prompts))
    assert sum(index in late for index in chosen) >= (2 if late else 0)
    assert len(late) == len(prompts) or sum(index not in late for index in chosen) >= 6


def test_a_short_one_passes_a_long_one_that_has_time() -> None:
    long, short = Due(2.0, 3.9), Due(0.1, 4.0)
    assert next_prompt([long, short], 1) == 1
    assert next_prompt([Due(3.85, 3.9), short], 1) == 0, "it would make the long one late"
    assert next_prompt([Due(5.0, 3.9), short], 1) == 1


@given(st.integers(1, 6), st.integers(0, 100))
def test_without_targets_everybody_has_a_turn(count: int, begin: int) -> None:
    chosen = [in_turn(count, turn) for turn in range(begin, begin + 2 * count)]
    assert set(chosen) == set(range(count))
    assert chosen.count(0) >= count
