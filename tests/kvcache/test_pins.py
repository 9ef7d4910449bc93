"""Operators' pins: one a block however often it is asked for, gone when its time is up or when it is taken back."""

from __future__ import annotations

import pytest
from katydid_kvcache import pins
from katydid_kvcache.pins import OperatorPins

from tests.kvcache.test_store import SMALL, make_store, write

A = b"a" * 32


def test_a_block_is_pinned_once_and_until_the_last_time_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pins.time, "monotonic", lambda: now[0])
    store = make_store()
    kept, other = (write(store, A, SMALL, number) for number in range(2))
    space, books = kept.namespace, OperatorPins(store)
    assert books.keep(space, [kept.hash, b"?" * 32, kept.hash], 10.0) == 2
    assert books.keep(space, [kept.hash, other.hash], 20.0) == 2
    assert (len(books), kept.pins, other.pins) == (2, 1, 1)
    now[0] = 119.9
    books.expire()
    assert (kept.pins, other.pins) == (1, 1)
    assert books.keep(space, [other.hash], 0.0) == 1
    assert books.keep(space, [other.hash], 0.0) == 1
    assert (kept.pins, other.pins) == (1, 0)
    now[0] = 120.0
    books.expire()
    books.expire()
    assert (len(books), kept.pins) == (0, 0)


def test_half_a_block_is_not_pinned() -> None:
    store = make_store()
    write(store, A, SMALL, 1)
    space = store.namespaces[A]
    space.blocks[b"\1" * 32].heads = 1
    assert OperatorPins(store).keep(space, [b"\1" * 32], 10.0) == 0
