"""The gate: one at a time while there is room, in fair order, and whoever leaves the line holds up nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from katydid_gateway.flow.fair_queue import PriorityClass, Ticket
from katydid_gateway.flow.gate import Gate
from katydid_runtime.errors import OverloadedError


class Line:
    """A gate before an engine of so many places."""

    def __init__(self, places: int, max_queued: int = 100) -> None:
        self.places = places
        self.passed: list[str] = []
        self.gate = Gate(lambda: self.places > 0, lambda: 100.0, max_queued)

    async def come(self, name: str, cost: int = 10, level: PriorityClass = PriorityClass.NORMAL) -> None:
        async with self.gate.turn(Ticket(name, cost, level, time.monotonic())):
            await asyncio.sleep(0)
            assert self.places > 0, "two saw one place"
            self.places -= 1
            self.passed.append(name)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))  # type: ignore[arg-type]


def test_an_open_gate_is_passed_at_once() -> None:
    async def scenario() -> None:
        line = Line(2)
        assert line.gate.open
        await line.come("a")
        await line.come("b")
        assert not line.gate.open

    run(scenario)


def test_places_go_round_tenants() -> None:
    async def scenario() -> None:
        line = Line(0)
        tasks = [asyncio.create_task(line.come("flood")) for _ in range(20)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(line.come("other")))
        await asyncio.sleep(0)
        assert len(line.gate.queue) == 21
        line.places = 3
        while len(line.passed) < 3:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert line.passed == ["flood", "other", "flood"]
        line.places = 100
        await asyncio.gather(*tasks)
        assert not len(line.gate.queue)
        assert line.gate.open

    run(scenario)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_who_leaves_holds_up_nobody(at: int) -> None:
    async def scenario() -> None:
        line = Line(0)
        tasks = [asyncio.create_task(line.come(f"{number}")) for number in range(6)]
        await asyncio.sleep(0)
        line.places = 10
        # At every moment of the first one's turn: before it, when it was given, when it is taken.
        line.gate._look()
        for _ in range(at):
            await asyncio.sleep(0)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [result for result in results[1:] if result is not None] == []
        assert line.gate.open
        assert len(line.passed) in (5, 6)

    run(scenario)


def test_a_full_line_refuses_with_a_time() -> None:
    async def scenario() -> None:
        line = Line(0, max_queued=2)
        tasks = [asyncio.create_task(line.come("a", 100)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="2 requests wait") as caught:
            await line.come("a")
        assert caught.value.retry_after_s == pytest.approx(2.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not len(line.gate.queue)

    run(scenario)


def test_a_line_full_of_bulk_lets_the_urgent_in() -> None:
    async def scenario() -> None:
        line = Line(0, max_queued=4)
        bulk = [asyncio.create_task(line.come(f"{number}", level=PriorityClass.BULK)) for number in range(4)]
        await asyncio.sleep(0)
        urgent = [asyncio.create_task(line.come("urgent", level=PriorityClass.URGENT)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="4 requests wait"):
            await bulk[3]
        assert len(line.gate.queue) == 4
        with pytest.raises(OverloadedError):
            await line.come("late", level=PriorityClass.BULK)
        line.places = 100
        results = await asyncio.gather(*bulk, *urgent, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), *[OverloadedError] * 3, *[type(None)] * 3]
        assert line.passed[:3] == ["urgent"] * 3
        assert line.gate.open

    run(scenario)


def test_a_place_of_one_that_is_just_leaving_is_taken() -> None:
    async def scenario() -> None:
        line = Line(0, max_queued=1)
        bulk = asyncio.create_task(line.come("bulk", level=PriorityClass.BULK))
        await asyncio.sleep(0)
        urgent = asyncio.create_task(line.come("urgent", level=PriorityClass.URGENT))
        bulk.cancel()
        await asyncio.gather(bulk, return_exceptions=True)
        assert bulk.cancelled()
        line.places = 1
        await urgent
        assert line.gate.open is False
        assert not len(line.gate.queue)

    run(scenario)


def test_one_that_is_displaced_and_leaves_gives_away_no_turn_of_another() -> None:
    async def scenario() -> None:
        line, sent = Line(1, max_queued=1), asyncio.Event()

        async def sending() -> None:
            async with line.gate.turn(Ticket("first", 10, PriorityClass.NORMAL, time.monotonic())):
                await sent.wait()
                line.places -= 1

        first = asyncio.create_task(sending())
        await asyncio.sleep(0)
        bulk = asyncio.create_task(line.come("bulk", level=PriorityClass.BULK))
        await asyncio.sleep(0)
        urgent = asyncio.create_task(line.come("urgent", level=PriorityClass.URGENT))
        await asyncio.sleep(0)
        bulk.cancel()
        await asyncio.gather(bulk, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert line.passed == [], "the only place is promised to the first"
        sent.set()
        await first
        line.places = 1
        await urgent
        assert line.gate.open is False
        assert not len(line.gate.queue)

    run(scenario)


def test_a_flood_does_not_keep_others_out_of_a_full_line() -> None:
    async def scenario() -> None:
        line = Line(0, max_queued=10)
        flood = [asyncio.create_task(line.come("flood")) for _ in range(10)]
        await asyncio.sleep(0)
        others = [asyncio.create_task(line.come("other")) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await line.come("other")
        with pytest.raises(OverloadedError):
            await line.come("flood")
        line.places = 100
        results = await asyncio.gather(*flood, *others, return_exceptions=True)
        assert [result is None for result in results] == [*[True] * 5, *[False] * 5, *[True] * 5], "its last ones leave"

    run(scenario)
