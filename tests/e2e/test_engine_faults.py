"""An engine that is killed, frozen or wedged in mid-load costs time, and not one token: its answers go on elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.fleet import Fleet, Process
from tests.e2e.load import Answer, Ask, Load, Outcome

pytestmark = pytest.mark.e2e

# Many times what passes between the first tokens and the stop that follows them.
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
        async with asyncio.timeout(120):
            while sum(events > 4 for events in self.begun.values()) < count:
                await asyncio.sleep(0.01)

    async def outcomes(self) -> list[Outcome]:
        return await asyncio.gather(*self.tasks)


@dataclass(frozen=True)
class Victim:
    """An engine whose step loop stands still with `running` requests in it, all of which have begun."""

    name: str
    engine: Process
    running: int
    resumed_before: float


async def caught(fleet: Fleet, running: Running) -> Victim:
    """Stops the engine that runs most requests between two of their tokens.

    The workers of both are stopped before their faces are asked, so that what they say stays true; it does not matter
    how long asking takes, nor which engine the requests went to.
    """
    before = {name: fleet.resumed(name) for name in fleet.engines}
    await running.until_begun(16)
    for engine in fleet.engines.values():
        engine.freeze(engine.workers)
    at_work = {name: await at_rest(engine) for name, engine in fleet.engines.items()}
    name = max(at_work, key=at_work.__getitem__)
    assert 4 <= at_work[name] <= 16, f"no more than an engine has places for: {at_work}"
    fleet.engines[fleet.other(name)].thaw()
    return Victim(name, fleet.engines[name], at_work[name], before[name])


async def at_rest(engine: Process) -> int:
    """What the face of an engine without a working worker says that it runs, once it has heard all there is."""
    said: list[float] = []
    async with asyncio.timeout(30):
        while len(said) < 3 or len(set(said[-3:])) > 1:
            said.append(await asyncio.to_thread(engine.metric, "katydid_engine_running_choices"))
            await asyncio.sleep(0.02)
    return int(said[-1])


async def check(fleet: Fleet, victim: Victim, running: Running, load: Load) -> None:
    """Every outcome is the whole right answer, and those that ran on the lost engine went on elsewhere."""
    outcomes = await running.outcomes()
    resumed = fleet.resumed(victim.name) - victim.resumed_before
    assert all(isinstance(outcome, Answer) and outcome.output_tokens == TOKENS for outcome in outcomes), outcomes
    # Those that were under way when the engine was lost, and others.
    sample = range(0, len(outcomes), max(1, len(outcomes) // 6))
    alone = await load.one_at_a_time([running.asks[number] for number in sample])
    assert [outcomes[number] for number in sample] == alone
    assert 0 < resumed <= victim.running


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
            victim = await caught(fleet, running)
            await asyncio.to_thread(victim.engine.kill)
            await check(fleet, victim, running, load)
            await asyncio.to_thread(victim.engine.start)
            await fleet.whole()
            await gets_traffic(fleet, load, victim.name)

    asyncio.run(scenario())


def test_a_wedged_worker_turns_unhealthy_and_is_left_alone(fleet: Fleet) -> None:
    """The step loop hangs, the engine's face lives: its health says so, and its requests move."""
    fleet.expected_errors.update(EXPECTED_ERRORS)

    async def scenario() -> None:
        async with Load(fleet) as load:
            running = Running(load)
            victim = await caught(fleet, running)
            async with asyncio.timeout(60):
                while await health(victim.engine) != NOT_SERVING:
                    await asyncio.sleep(0.1)
                while victim.name in await asyncio.to_thread(fleet.connected):
                    await asyncio.sleep(0.1)
            await check(fleet, victim, running, load)
            before = fleet.routed(victim.name)
            elsewhere = await load.all_at_once([Ask(f"{number} goes elsewhere") for number in range(8)])
            assert all(isinstance(outcome, Answer) for outcome in elsewhere)
            assert fleet.routed(victim.name) == before
            victim.engine.thaw()
            async with asyncio.timeout(60):
                while await health(victim.engine) != SERVING:
                    await asyncio.sleep(0.1)
            await fleet.whole()
            await gets_traffic(fleet, load, victim.name)

    asyncio.run(scenario())


def test_a_frozen_engine_is_left_alone(fleet: Fleet) -> None:
    """SIGSTOP to all of an engine: its sockets stay open, it says nothing."""
    fleet.expected_errors.update(EXPECTED_ERRORS)

    async def scenario() -> None:
        async with Load(fleet) as load:
            running = Running(load, 32)
            victim = await caught(fleet, running)
            victim.engine.freeze()
            await check(fleet, victim, running, load)
            victim.engine.thaw()
            await fleet.whole()
            await gets_traffic(fleet, load, victim.name)

    asyncio.run(scenario())
