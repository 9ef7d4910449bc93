"""An engine that is killed, frozen or wedged in mid-load costs time, and not one token: its answers go on elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.fleet import Fleet, Process
from tests.e2e.load import Answer, Ask, Load, Outcome

pytestmark = pytest.mark.e2e

VICTIM = "engine-a"
TOKENS = 120
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

EXPECTED_ERRORS = (
    "a step loop is stuck",
    "engine hangs, its requests are given up",
    "engine fails its requests",
)


class Running:
    """Long streams, twice as many as both engines have places for, so that some wait for their first token."""

    def __init__(self, load: Load, count: int = 48) -> None:
        self.asks = [
            Ask(
                f"request {number} " * 4,
                TOKENS,
                sampling={"ignore_eos": True, "seed": number, "temperature": number % 2},
            )
            for number in range(count)
        ]
        self.begun: Counter[int] = Counter()
        ways = (load.over_grpc, load.over_http)
        self.tasks = [asyncio.create_task(self._run(number, ways[number % 2])) for number in range(count)]

    async def _run(self, number: int, way: Callable[..., object]) -> Outcome:
        return await way(self.asks[number], lambda: self.begun.update([number]))  # type: ignore[misc]

    async def until_begun(self, count: int) -> None:
        async with asyncio.timeout(60):
            while sum(events > 4 for events in self.begun.values()) < count:
                await asyncio.sleep(0.02)

    async def outcomes(self) -> list[Outcome]:
        return await asyncio.gather(*self.tasks)


async def check(running: Running, outcomes: list[Outcome], load: Load, resumed: int) -> None:
    """Every outcome is the whole right answer, and some were begun on the lost engine."""
    assert all(isinstance(outcome, Answer) and outcome.output_tokens == TOKENS for outcome in outcomes), outcomes
    # Those that were under way when the engine was lost, and others.
    sample = range(0, len(outcomes), max(1, len(outcomes) // 8))
    alone = await load.one_at_a_time([running.asks[number] for number in sample])
    assert [outcomes[number] for number in sample] == alone
    assert 0 < resumed <= 16, "no more than the engine had places for"


async def gets_traffic(fleet: Fleet, load: Load, engine: str) -> None:
    before = fleet.routed(engine)
    deadline = time.monotonic() + 30
    while fleet.routed(engine) == before:
        assert time.monotonic() < deadline, f"{engine} gets no requests"
        asks = [Ask(f"{number} is a new prompt at {time.monotonic()}") for number in range(8)]
        assert all(isinstance(outcome, Answer) for outcome in await load.all_at_once(asks))


async def health(process: Process) -> int:
    async with grpc.aio.insecure_channel(process.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        return int(answer.status)


def test_kill_9_in_mid_load(fleet: Fleet) -> None:
    fleet.expected_errors.update(EXPECTED_ERRORS)

    async def scenario() -> None:
        async with Load(fleet) as load:
            running = Running(load)
            await running.until_begun(20)
            before = fleet.resumed(VICTIM)
            await asyncio.to_thread(fleet.engines[VICTIM].kill)
            await check(running, await running.outcomes(), load, fleet.resumed(VICTIM) - before)
            await asyncio.to_thread(fleet.engines[VICTIM].start)
            await fleet.whole()
            await gets_traffic(fleet, load, VICTIM)

    asyncio.run(scenario())


def test_a_wedged_worker_turns_unhealthy_and_is_left_alone(fleet: Fleet) -> None:
    """The step loop hangs, the engine's face lives: its health says so, and its requests move."""
    fleet.expected_errors.update(EXPECTED_ERRORS)
    engine = fleet.engines[VICTIM]

    async def scenario() -> None:
        async with Load(fleet) as load:
            running = Running(load)
            await running.until_begun(20)
            before = fleet.resumed(VICTIM)
            engine.freeze(engine.workers)
            async with asyncio.timeout(20):
                while await health(engine) != NOT_SERVING:
                    await asyncio.sleep(0.1)
                while VICTIM in fleet.connected():
                    await asyncio.sleep(0.1)
            await check(running, await running.outcomes(), load, fleet.resumed(VICTIM) - before)
            before = fleet.routed(VICTIM)
            elsewhere = await load.all_at_once([Ask(f"{number} goes elsewhere") for number in range(8)])
            assert all(isinstance(outcome, Answer) for outcome in elsewhere)
            assert fleet.routed(VICTIM) == before
            engine.thaw()
            async with asyncio.timeout(20):
                while await health(engine) != SERVING:
                    await asyncio.sleep(0.1)
            await fleet.whole()
            await gets_traffic(fleet, load, VICTIM)

    asyncio.run(scenario())


def test_a_frozen_engine_is_left_alone(fleet: Fleet) -> None:
    """SIGSTOP to all of an engine: its sockets stay open, it says nothing."""
    fleet.expected_errors.update(EXPECTED_ERRORS)
    engine = fleet.engines[VICTIM]

    async def scenario() -> None:
        async with Load(fleet) as load:
            running = Running(load, 32)
            await running.until_begun(16)
            before = fleet.resumed(VICTIM)
            engine.freeze()
            await check(running, await running.outcomes(), load, fleet.resumed(VICTIM) - before)
            engine.thaw()
            await fleet.whole()
            await gets_traffic(fleet, load, VICTIM)

    asyncio.run(scenario())
