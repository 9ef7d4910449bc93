"""SIGTERM under load: open streams are finished, new requests are refused or go elsewhere, the exit code is 0."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import pytest

from tests.e2e.fleet import Fleet, Process
from tests.e2e.load import Ask, Failure, Load, Outcome

pytestmark = pytest.mark.e2e

T = TypeVar("T")


async def streams(load: Load, count: int = 12) -> tuple[list[Ask], list[asyncio.Task[Outcome]]]:
    """Long streams over both APIs, all of which have begun."""
    asks = [
        Ask(f"stream {number}", 500, sampling={"ignore_eos": True, "temperature": number % 2, "seed": number})
        for number in range(count)
    ]
    begun: set[int] = set()
    ways = (load.over_grpc, load.over_http)
    tasks = [
        asyncio.create_task(ways[number % 2](ask, lambda number=number: begun.add(number)))
        for number, ask in enumerate(asks)
    ]
    async with asyncio.timeout(60):
        while len(begun) < count:
            await asyncio.sleep(0.02)
    return asks, tasks


def some(items: list[T]) -> list[T]:
    return items[::4]


async def ended(process: Process) -> None:
    assert await asyncio.to_thread(process.exit_code) == 0
    assert process.pids == []


def test_a_gateway_told_to_stop_finishes_its_streams(fleet: Fleet) -> None:
    async def scenario() -> None:
        async with Load(fleet) as load, Load(fleet) as newcomer:
            asks, running = await streams(load)
            fleet.gateway.terminate()
            await asyncio.sleep(0.3)
            for refused in (await newcomer.over_grpc(Ask("too late")), await newcomer.over_http(Ask("too late"))):
                assert isinstance(refused, Failure)
                assert refused.code in ("draining", "unavailable", "transport: ConnectError")
            outcomes = await asyncio.gather(*running)
            assert not [outcome for outcome in outcomes if isinstance(outcome, Failure)]
            await ended(fleet.gateway)
        await asyncio.to_thread(fleet.gateway.start)
        await fleet.whole()
        async with Load(fleet) as load:
            assert some(outcomes) == await load.one_at_a_time(some(asks))

    asyncio.run(scenario())


def test_an_engine_told_to_stop_finishes_its_streams(fleet: Fleet) -> None:
    async def scenario() -> None:
        async with Load(fleet) as load:
            asks, running = await streams(load)
            held = {name: one.metric("katydid_engine_in_flight_requests") for name, one in fleet.engines.items()}
            engine = fleet.engines[max(held, key=held.__getitem__)]
            assert max(held.values()) > 0
            engine.terminate()
            late = [Ask(f"late {number}", 4, sampling={"temperature": 0.0}) for number in range(10)]
            outcomes = await load.all_at_once(late)
            assert outcomes == await load.one_at_a_time(late), "new requests go to the other engine"
            finished = await asyncio.gather(*running)
            assert not [outcome for outcome in finished if isinstance(outcome, Failure)]
            await ended(engine)
            await asyncio.to_thread(engine.start)
            await fleet.whole()
            assert some(finished) == await load.one_at_a_time(some(asks))

    asyncio.run(scenario())


def test_a_cache_service_told_to_stop_costs_no_answer(fleet: Fleet) -> None:
    async def scenario() -> None:
        async with Load(fleet) as load:
            asks, running = await streams(load)
            fleet.kvcache.terminate()
            finished = await asyncio.gather(*running)
            assert not [outcome for outcome in finished if isinstance(outcome, Failure)]
            await ended(fleet.kvcache)
            await asyncio.to_thread(fleet.kvcache.start)
            await fleet.whole()
            assert some(finished) == await load.one_at_a_time(some(asks))

    asyncio.run(scenario())
