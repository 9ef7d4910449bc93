"""Reservations belong to their owner and end once."""

from __future__ import annotations

from typing import cast

import pytest
from katydid_kvcache.reservations import Reservation, Reservations
from katydid_kvcache.store import Write
from katydid_runtime.errors import ConflictError


def writes(*names: str) -> list[Write]:
    """Stand-ins: the books never look inside a write."""
    return cast("list[Write]", list(names))


def test_only_the_owner_finds_its_reservation() -> None:
    books = Reservations()
    mine, other = books.add(1, writes("a", "b"), 60.0, 5.0), books.add(2, writes("c"), 60.0)
    assert books.find(1, mine) == Reservation(1, writes("a", "b"), 60.0, 5.0)
    with pytest.raises(ConflictError) as caught:
        books.find(1, other)
    assert caught.value.field == "reservation"
    books.remove(mine)
    with pytest.raises(ConflictError):
        books.find(1, mine)
    assert len(books) == 1


def test_a_gone_owner_gives_back_everything_once() -> None:
    books = Reservations()
    for owner, name in ((1, "a"), (2, "b"), (1, "c")):
        books.add(owner, writes(name), 60.0)
    assert sorted(cast("list[str]", books.drop_owner(1))) == ["a", "c"]
    assert books.drop_owner(1) == []
    assert len(books) == 1


def test_what_is_not_committed_in_time_is_given_back_once() -> None:
    books = Reservations()
    for owner, ends_at in ((1, 10.0), (2, 20.0), (1, 10.0)):
        books.add(owner, writes(f"{owner}"), ends_at)
    assert books.expire(9.9) == []
    assert books.expire(10.0) == writes("1", "1")
    assert books.expire(10.0) == []
    assert len(books) == 1
    assert books.drop_owner(2) == writes("2")
    assert books.expire(30.0) == []
