"""The fair queue: nobody's share suffers from another's flood, classes are served in order, and nothing starves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_gateway.flow.fair_queue import PATIENCE_S, FairQueue, PriorityClass, Ticket, class_of

COSTS = st.integers(1, 1000)
TENANTS = st.sampled_from("abc")


def ticket(tenant: str, cost: int = 1, priority: PriorityClass = PriorityClass.NORMAL, since: float = 0.0) -> Ticket:
    return Ticket(tenant, cost, priority, since)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), COSTS), min_size=1),
    st.dictionaries(st.sampled_from("abc"), st.floats(0.5, 4)),
)
def test_tenants_that_wait_are_served_by_their_weights(asked: list[tuple[str, int]], weights: dict[str, float]) -> None:
    queue = FairQueue()
    left: Counter[str] = Counter()
    for tenant, cost in asked:
        queue.push(Ticket(tenant, cost, PriorityClass.NORMAL, 0.0, weights.get(tenant, 1.0)))
        left[tenant] += 1
    served: dict[str, float] = dict.fromkeys("abc", 0.0)
    most = {tenant: max([cost for name, cost in asked if name == tenant], default=0) for tenant in "abc"}
    while (turn := queue.pop(0.0)) is not None:
        served[turn.tenant] += turn.cost / turn.weight
        left[turn.tenant] -= 1
        waiting = [tenant for tenant in "abc" if left[tenant]]
        for one in waiting:
            for other in waiting:
                # The bound of start-time fair queueing for tenants that wait all the time.
                slack = most[one] / weights.get(one, 1.0) + most[other] / weights.get(other, 1.0)
                assert served[one] - served[other] <= slack + 1e-6
    assert sum(left.values()) == 0
    assert queue.cost == 0


def test_a_newcomer_does_not_wait_for_a_flood() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.push(ticket("flood", 1000))
    assert queue.pop(0.0) is not None
    queue.push(ticket("other", 1000))
    assert [turn.tenant for turn in (queue.pop(0.0), queue.pop(0.0)) if turn].count("other") == 1


@given(st.integers(1, 30), st.integers(1, 30))
def test_a_newcomer_shares_with_those_that_were_served_before(served: int, both: int) -> None:
    """It has not saved up the time in which it asked for nothing."""
    queue = FairQueue()
    for _ in range(served + both):
        queue.push(ticket("a", 10))
    for _ in range(served):
        queue.pop(0.0)
    for _ in range(both):
        queue.push(ticket("b", 10))
    turns = [turn.tenant for _ in range(2 * both) if (turn := queue.pop(0.0)) is not None]
    for end in range(len(turns) + 1):
        assert abs(turns[:end].count("a") - turns[:end].count("b")) <= 2


def test_past_service_is_no_debt() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.push(ticket("a", 1000))
    while queue.pop(0.0) is not None:
        pass
    queue.push(ticket("a", since=1))
    queue.push(ticket("b", since=1))
    first = queue.pop(1.0)
    assert first is not None
    assert first.tenant == "a"


@pytest.mark.parametrize(
    ("priority", "expected"),
    [(1000, 0), (100, 0), (99, 1), (0, 1), (-1, 2), (-100, 2), (-101, 3), (-1000, 3)],
)
def test_the_class_of_a_priority(priority: int, expected: int) -> None:
    assert class_of(priority) == expected


@pytest.mark.parametrize("since", [0.0, 1000.0])
def test_patience_is_counted_from_when_a_request_came(since: float) -> None:
    queue = FairQueue()
    waiting = ticket("a", since=since)
    queue.push(waiting)
    for waited, served in ((0.0, False), (9.9, False), (10.0, True)):
        queue.push(ticket("b", priority=PriorityClass.URGENT, since=since + waited))
        assert (queue.pop(since + waited) is waiting) == served


def test_classes_in_order_and_patience_moves_up() -> None:
    queue = FairQueue()
    tickets = {level: ticket("a", priority=level) for level in reversed(PriorityClass)}
    for each in tickets.values():
        queue.push(each)
    assert [queue.waiting(level) for level in PriorityClass] == [1, 1, 1, 1]
    order = [queue.pop(0.0) for _ in PriorityClass]
    assert order == [tickets[level] for level in PriorityClass]
    bulk = ticket("a", priority=PriorityClass.BULK)
    queue.push(bulk)
    late = PATIENCE_S[PriorityClass.BULK] + PATIENCE_S[PriorityClass.LOW]
    queue.push(ticket("b", priority=PriorityClass.LOW, since=late))
    queue.pop(late)
    assert bulk.level is PriorityClass.LOW
    # Moved up for good: once at the top it is before every newcomer of its old class.
    queue = FairQueue()
    bulk = ticket("a", priority=PriorityClass.BULK)
    queue.push(bulk)
    for step in range(1, 400):
        queue.push(ticket("b", priority=PriorityClass.NORMAL, since=float(step)))
        if queue.pop(float(step)) is bulk:
            break
    else:
        raise AssertionError("it starves")


@given(st.lists(st.tuples(st.integers(-1000, 1000), COSTS)), st.data())
def test_who_leaves_is_not_served(asked: list[tuple[int, int]], data: st.DataObject) -> None:
    queue = FairQueue()
    tickets = [Ticket("t", cost, class_of(priority), 0.0) for priority, cost in asked]
    for each in tickets:
        queue.push(each)
    leaving = [each for each in tickets if data.draw(st.booleans())]
    for each in leaving:
        queue.remove(each)
        queue.remove(each)
    stay = [each for each in tickets if each not in leaving]
    assert len(queue) == len(stay)
    assert queue.cost == sum(each.cost for each in stay)
    assert list(queue) == stay
    served = []
    while (turn := queue.pop(0.0)) is not None:
        served.append(turn)
    assert sorted(map(id, served)) == sorted(map(id, stay))
    assert [turn.priority for turn in served] == sorted(turn.priority for turn in served)
    assert not len(queue)
    assert all(queue.waiting(level) == 0 for level in PriorityClass)


@given(
    st.lists(st.tuples(TENANTS, st.sampled_from(PriorityClass)), max_size=12),
    TENANTS,
    st.sampled_from(PriorityClass),
    st.dictionaries(TENANTS, st.floats(0.5, 4)),
)
def test_of_a_full_queue_the_longest_of_the_least_urgent_is_cut(
    asked: list[tuple[str, PriorityClass]], tenant: str, level: PriorityClass, weights: dict[str, float]
) -> None:
    queue = FairQueue()
    tickets = [Ticket(name, 1, priority, 0.0, weights.get(name, 1.0)) for name, priority in asked]
    for one in tickets:
        queue.push(one)
    newcomer = Ticket(tenant, 1, level, 0.0, weights.get(tenant, 1.0))
    displaced = queue.displaced_by(newcomer)
    lowest = max((priority for _, priority in asked), default=level)
    share = {
        name: sum(asked_by == (name, lowest) for asked_by in [*asked, (tenant, level)]) / weights.get(name, 1.0)
        for name in "abc"
    }
    if displaced is None:
        assert lowest <= level, "nobody less urgent waits"
        assert lowest < level or share[tenant] == max(share.values())
    else:
        assert displaced.priority == lowest
        assert displaced.priority >= level
        assert share[displaced.tenant] == max(share.values())
        assert displaced is [one for one in tickets if (one.tenant, one.priority) == (displaced.tenant, lowest)][-1]
        if lowest == level:
            assert share[displaced.tenant] > share[tenant], "whoever comes is not better off than whoever leaves"
