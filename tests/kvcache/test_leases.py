"""Leases against a plain list of (id, owner, items, end)."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from katydid_kvcache.leases import LeaseTable

GRANT = st.tuples(st.just("grant"), st.integers(1, 3), st.integers(0, 50))
RELEASE = st.tuples(st.just("release"), st.integers(1, 3), st.integers(1, 60))
DROP = st.tuples(st.just("drop"), st.integers(1, 3), st.just(0))
EXPIRE = st.tuples(st.just("expire"), st.just(0), st.integers(0, 60))


@given(st.lists(st.one_of(GRANT, GRANT, RELEASE, DROP, EXPIRE), max_size=120))
def test_every_item_comes_back_once(operations: list[tuple[str, int, int]]) -> None:
    table: LeaseTable[str] = LeaseTable()
    model: dict[int, tuple[int, list[str], int]] = {}
    pinned: Counter[str] = Counter()
    for number, (operation, owner, value) in enumerate(operations):
        if operation == "grant":
            items = [f"block {number}", "shared"]
            lease = table.grant(owner, items, value)
            assert lease not in model
            model[lease] = owner, items, value
            pinned.update(items)
            continue
        if operation == "release":
            ending = [value] if value in model and model[value][0] == owner else []
            back = table.release(owner, value)
        elif operation == "drop":
            ending = [lease for lease, record in model.items() if record[0] == owner]
            back = table.drop_owner(owner)
        else:
            ending = [lease for lease, record in model.items() if record[2] <= value]
            back = table.expire(value)
        assert Counter(back) == Counter(item for lease in ending for item in model.pop(lease)[1])
        pinned.subtract(back)
        table.check_integrity()
        assert len(table) == len(model)
    assert +pinned == Counter(item for _, items, _ in model.values() for item in items)


def test_another_owner_cannot_release() -> None:
    table: LeaseTable[str] = LeaseTable()
    lease = table.grant(1, ["a"], 10)
    assert not table.release(2, lease)
    assert table.valid(1, lease)
    assert not table.valid(2, lease)
    assert table.release(1, lease) == ["a"]
    assert not table.release(1, lease)


def test_what_ended_early_does_not_pile_up() -> None:
    table: LeaseTable[str] = LeaseTable()
    for _ in range(10_000):
        table.release(1, table.grant(1, ["a"], 1e9))
    assert len(table._expiry) < 200
