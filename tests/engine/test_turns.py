"""One at a time, whoever leaves or fails, and no tenant before another's first."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.turns import Turns


async def order(asked: list[bytes], cancelled: frozenset[int] = frozenset(), failing: int = -1) -> list[int]:
    """Who had a turn, by place in `asked`, in this order; all ask while the first has it."""
    turns, had, inside = Turns(), [], 0

    async def ask(place: int) -> None:
        nonlocal inside
        async with turns.one(asked[place]):
            inside += 1
            assert inside == 1
            had.append(place)
            for _ in range(len(asked) + 2 if place == 0 else 1):
                await asyncio.sleep(0)
            inside -= 1
            if place == failing:
                raise ZeroDivisionError

    tasks = [asyncio.create_task(ask(place)) for place in range(len(asked))]
    await asyncio.sleep(0)
    for place in cancelled:
        tasks[place].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert not turns._taken
    assert not turns._waiting
    return had


def test_tenants_take_turns() -> None:
    assert asyncio.run(order([b"a", b"a", b"a", b"a", b"b", b"c", b"b"])) == [0, 1, 4, 5, 2, 6, 3]


@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=12), st.data())
def test_nobody_is_forgotten(asked: list[bytes], data: st.DataObject) -> None:
    places = st.integers(0, len(asked) - 1)
    cancelled = data.draw(st.frozensets(places.filter(bool) if len(asked) > 1 else st.nothing()))
    had = asyncio.run(order(asked, cancelled, data.draw(places)))
    assert sorted(had) == [place for place in range(len(asked)) if place not in cancelled]
    for tenant in set(asked):
        own = [place for place in had if asked[place] == tenant]
        assert own == sorted(own)


def test_one_that_leaves_as_its_turn_comes_hands_it_on() -> None:
    async def scenario() -> None:
        turns = Turns()
        holder = turns.one(b"a")
        await holder.__aenter__()
        waiting = [asyncio.create_task(turns.one(b"b").__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        await holder.__aexit__(None, None, None)
        waiting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        await asyncio.wait_for(waiting[1], 5)

    asyncio.run(scenario())
