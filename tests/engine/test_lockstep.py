"""Ranks that forward together, as threads; each notes what it computes and what it takes part in."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_engine.draft_depth import MAX_DRAFTS, DraftDepth
from katydid_engine.lockstep import Lockstep

from tests.engine.thread_group import ThreadGroup, on_ranks


class Closing:
    """Between rounds: whether all ranks have computed all they have."""

    def __init__(self) -> None:
        self.left = 0
        self.closed = False
        self.passing: list[bool] = []
        self.meanwhiles = [0]

    def progress(self) -> int:
        return self.left

    def agreed(self, progress: list[int], *, passing: bool) -> None:
        self.closed = not any(progress)
        self.passing.append(passing)
        self.meanwhiles.append(0)

    def meanwhile(self) -> None:
        self.meanwhiles[-1] += 1


def passes_of(group: ThreadGroup, wanted: list[int], behind: int = 0) -> tuple[list[tuple[int, bool]], list[bool]]:
    """(kind, own) of every pass, and whether a pass followed each round; each of kind 0 wants ``behind`` of kind 1."""
    seen: list[tuple[int, bool]] = []
    closing = Closing()

    def take_part(kind: int, _most: int, together: int) -> None:
        seen.extend([(kind, False)] + [(1, False)] * together)

    lockstep = Lockstep(group, take_part, closing)
    for index, kind in enumerate(wanted):
        closing.left = len(wanted) - index
        drafts = 0 if kind else behind
        _, together = lockstep.enter(kind, 1, drafts)
        seen.append((kind, True))
        assert together in (0, drafts)
        for _ in range(drafts):
            if not together:
                lockstep.enter(1, 1)
            seen.append((1, True))
    closing.left = 0
    while not closing.closed:
        lockstep.idle()
    assert all(closing.meanwhiles), "between any two rounds, at the latest before the second"
    return seen, closing.passing


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=3, max_size=3))
def test_every_rank_sees_the_same_passes(wanted: list[list[int]]) -> None:
    """Whatever each has to compute, all run the same kinds in the same order, and each computes its own."""
    found = on_ranks(3, lambda group: passes_of(group, wanted[group.rank]))
    kinds = [[kind for kind, _ in seen] for seen, _ in found]
    assert kinds[0] == kinds[1] == kinds[2]
    assert [[kind for kind, own in seen if own] for seen, _ in found] == wanted
    rounds = [passing for _, passing in found]
    assert rounds[0] == rounds[1] == rounds[2]
    assert sum(rounds[0]) == len(kinds[0])


def test_draft_passes_wait_for_the_target() -> None:
    found = on_ranks(2, lambda group: passes_of(group, [[0, 1], [1]][group.rank]))
    assert [seen for seen, _ in found] == [[(0, True), (1, True)], [(0, False), (1, True)]]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=4), st.integers(0, 2)), min_size=3, max_size=3))
def test_every_rank_sees_the_same_passes_with_drafts_behind(wanted: list[tuple[list[int], int]]) -> None:
    found = on_ranks(3, lambda group: passes_of(group, *wanted[group.rank]))
    kinds = [[kind for kind, _ in seen] for seen, _ in found]
    assert kinds[0] == kinds[1] == kinds[2]
    assert found[0][1] == found[1][1] == found[2][1]


def test_drafts_behind_a_pass_need_no_round_where_all_have_as_many() -> None:
    seen, rounds = on_ranks(3, lambda group: passes_of(group, [[0, 0], [], [0]][group.rank], 2))[0]
    assert [kind for kind, _ in seen] == [0, 1, 1, 0, 1, 1]
    assert sum(rounds) == 2
    seen, rounds = on_ranks(2, lambda group: passes_of(group, [0], 1 + group.rank))[0]
    assert [kind for kind, _ in seen] == [0, 1, 1]
    assert sum(rounds) == 3


def test_patience() -> None:
    def work(group: ThreadGroup) -> list[float]:
        lockstep = Lockstep(group, lambda kind, most, behind: None)
        before = lockstep.patience_s
        if group.rank:
            lockstep.enter(0, 1)
        else:
            lockstep.idle()
        after = lockstep.patience_s
        lockstep.idle()
        return [before, after, lockstep.patience_s]

    idle, computing = on_ranks(2, work)
    assert idle == [0.02, 0.0, 0.001], "at once after a pass, soon after an idle round within a second of one"
    assert computing[1] <= 0.001


def test_all_learn_the_most_rows_of_a_pass() -> None:
    def work(group: ThreadGroup) -> list[int]:
        taken: list[int] = []
        lockstep = Lockstep(group, lambda kind, most, behind: taken.append(most))
        if group.rank == 2:
            lockstep.idle()
            return taken
        return [lockstep.enter(0, 3 + 4 * group.rank)[0]]

    assert on_ranks(3, work) == [[7]] * 3


def steps_of(group: ThreadGroup, rows: list[int], rates: list[float]) -> list[tuple[int, bool]]:
    """How many tokens each step drafts, and whether its passes are agreed on at once, of a rank with as many rows in
    each step, whose drafts are so often right; a step costs the slowest rank's time, a draft a tenth of a step."""
    depth, steps = DraftDepth(MAX_DRAFTS, automatic=True), []
    lockstep = Lockstep(group, lambda kind, most, behind: None)
    depth.follow(lambda: lockstep.drafts)
    for sampled in rows:
        drafts = depth.choose(sampled)
        lockstep.expect(sampled, depth.wish)
        _, together = lockstep.enter(0, sampled, drafts)
        for behind in range(0 if together else drafts):
            lockstep.enter(1 + behind, sampled)
        for row in range(sampled):
            depth.verified(drafts, drafts if row < rates[group.rank] * sampled else 0)
        depth.took(sampled, drafts, 0.010 + 0.001 * drafts)
        steps.append((drafts, together == drafts))
    while True:
        lockstep.idle()
        if lockstep.patience_s:  # nobody passed
            break
    return steps


def test_ranks_draft_as_many_though_each_would_choose_another_number() -> None:
    """The rank with the most rows chooses; the first, where they are as many."""
    few, many = on_ranks(2, lambda group: steps_of(group, [[8, 32][group.rank]] * 120, [1.0, 0.0]))
    assert [drafts for drafts, _ in many[40:]] == [0] * 80, "the second rank's drafts are never right"
    assert [drafts for drafts, _ in few[40:]] == [0] * 80, "which the first one's are"
    found = on_ranks(2, lambda group: steps_of(group, [16] * 120, [1.0, 0.0]))
    for steps in found:
        assert [drafts for drafts, _ in steps[40:]] == [MAX_DRAFTS] * 80
        assert all(together for _, together in steps), "and no round is for a draft layer's pass alone"


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=3, max_size=3))
def test_steps_that_begin_together_agree_whatever_each_wishes(rows: list[list[int]]) -> None:
    found = on_ranks(3, lambda group: steps_of(group, rows[group.rank], [0.0, 0.5, 1.0]))
    for drafted in zip(*found, strict=False):
        assert len({drafts for drafts, _ in drafted}) == 1
