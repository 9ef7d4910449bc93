"""An engine that is killed, frozen or wedged in mid-load costs the requests it was answering, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.fleet import Fleet, Process
from tests.e2e.load import Answer, Ask, Failure, Load, Outcome

pytestmark = pytest.mark.e2e

VICTIM = "engine-a"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Running:
    """Long streams, twice as many as both engines have places for, so that some wait for their first token."""

    def __init__(self, load: Load, count: int = 48) -> None:
        self.asks = [
            Ask(f"request {number} " * 4, 200, sampling={"ignore_eos": True, "seed": number, "temperature": number % 2})
            for number in range(count)
        ]
        self.begun: Counter[int] = Counter()
        self.ended_at: dict[int, float] = {}
        ways = (load.over_grpc, load.over_http)
        self.tasks = [asyncio.create_task(self._run(number, ways[number % 2])) for number in range(count)]

    async def _run(self, number: int, way: Callable[..., object]) -> Outcome:
        outcome = await way(self.asks[number], lambda: self.begun.update([number]))  # type: ignore[misc]
        self.ended_at[number] = time.monotonic()
        return outcome

    async def until_begun(self, count: int) -> None:
        async with asyncio.timeout(60):
            while sum(events > 4 for events in self.begun.values()) < count:
                await asyncio.sleep(0.02)

    async def outcomes(self) -> list[Outcome]:
        return await asyncio.gather(*self.tasks)


async def check(running: Running, outcomes: list[Outcome], load: Load, broken_at: float, within_s: float) -> int:
    """Every outcome is the whole right answer, or a typed error of a stream that had begun, soon after `broken_at`.
    Returns the number of errors."""
    failed = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, Failure)]
    for number in failed:
        assert outcomes[number] == Failure("engine_lost", delivered=True), (number, outcomes[number])
        assert running.ended_at[number] - broken_at < within_s
    whole = [number for number in range(len(outcomes)) if number not in failed]
    assert all(
        isinstance(answer, Answer) and answer.output_tokens == 200 for answer in map(outcomes.__getitem__, whole)
    )
    sample = whole[:: max(1, len(whole) // 8)]
    alone = await load.one_at_a_time([running.asks[number] for number in sample])
    assert [outcomes[number] for number in sample] == alone
    assert all(
        isinstance(outcome, Answer) and outcome.output_tokens == 200 for outcome in map(outcomes.__getitem__, whole)
    )
    return len(failed)


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
    async def scenario() -> None:
        async with Load(fleet) as load:
            running = Running(load)
            await running.until_begun(20)
            killed_at = time.monotonic()
            await asyncio.to_thread(fleet.engines[VICTIM].kill)
            outcomes = await running.outcomes()
            errors = await check(running, outcomes, load, killed_at, within_s=5)
            assert 0 < errors <= 16, "no more than the engine had places for"
            await asyncio.to_thread(fleet.engines[VICTIM].start)
            await fleet.whole()
            await gets_traffic(fleet, load, VICTIM)

    asyncio.run(scenario())


def test_a_wedged_worker_turns_unhealthy_and_is_left_alone(fleet: Fleet) -> None:
    """The step loop hangs, the engine's face lives: its health says so, and its requests move."""
    fleet.expected_errors.update(("a step loop is stuck", "engine hangs, its requests are given up"))
    engine = fleet.engines[VICTIM]

    async def scenario() -> None:
        async with Load(fleet) as load:
            running = Running(load)
            await running.until_begun(20)
            wedged_at = time.monotonic()
            engine.freeze(engine.workers)
            async with asyncio.timeout(20):
                while await health(engine) != NOT_SERVING:
                    await asyncio.sleep(0.1)
                while VICTIM in fleet.connected():
                    await asyncio.sleep(0.1)
            outcomes = await running.outcomes()
            errors = await check(running, outcomes, load, wedged_at, within_s=25)
            assert 0 < errors <= 16
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
    fleet.expected_errors.update(("a step loop is stuck", "engine hangs, its requests are given up"))
    engine = fleet.engines[VICTIM]

    async def scenario() -> None:
        async with Load(fleet) as load:
            running = Running(load, 32)
            await running.until_begun(16)
            frozen_at = time.monotonic()
            engine.freeze()
            outcomes = await running.outcomes()
            errors = await check(running, outcomes, load, frozen_at, within_s=25)
            assert 0 < errors <= 16
            engine.thaw()
            await fleet.whole()
            await gets_traffic(fleet, load, VICTIM)

    asyncio.run(scenario())
