"""A client that leaves, in mid-stream or while it waits, costs the engine nothing from then on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from katydid_client import DeadlineExceededError

from tests.e2e.fleet import Fleet
from tests.e2e.load import Answer, Ask, Load

pytestmark = pytest.mark.e2e

ENDLESS = {"ignore_eos": True, "temperature": 1.0}


def held(fleet: Fleet) -> float:
    """Requests that engines hold, running or waiting."""
    return sum(engine.metric("katydid_engine_in_flight_requests") for engine in fleet.engines.values())


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_leaving_in_mid_stream_and_while_queued(fleet: Fleet, way: str) -> None:
    """Forty requests that would run for minutes: thirty-two have places, the others wait. All leave at once."""

    async def scenario() -> None:
        async with Load(fleet) as load:
            ask: Callable[..., Awaitable[object]] = load.over_http if way == "http" else load.over_grpc
            asks = [Ask(f"{way} request {number}", 3500, sampling={**ENDLESS, "seed": number}) for number in range(40)]
            begun: set[int] = set()
            running = [
                asyncio.ensure_future(ask(one, lambda number=number: begun.add(number)))
                for number, one in enumerate(asks)
            ]
            await until(lambda: held(fleet) == 40 and len(begun) >= 20, 60)
            assert len(begun) < 40, "some are still queued"
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            left_at = time.monotonic()
            await until(lambda: held(fleet) == 0, 10)
            # A metric is read in milliseconds; running to the end would have taken minutes.
            assert time.monotonic() - left_at < 10
            await fleet.idle()
            assert isinstance(await load.over_grpc(Ask("and it goes on")), Answer)

    asyncio.run(scenario())


def test_leaving_before_the_whole_answer(fleet: Fleet) -> None:
    """Without a stream too."""

    async def scenario() -> None:
        async with Load(fleet) as load:
            body = {"prompt": "no stream", "max_tokens": 3500, "ignore_eos": True}
            running = [asyncio.create_task(load.http.post("/completions", json=body)) for _ in range(4)]
            await until(lambda: held(fleet) == 4, 30)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await until(lambda: held(fleet) == 0, 10)

    asyncio.run(scenario())


def test_a_deadline_ends_the_request_everywhere(fleet: Fleet) -> None:
    async def scenario() -> None:
        async with Load(fleet) as load:
            client = load.sdk.with_options(timeout=1.0)
            with pytest.raises(DeadlineExceededError):
                await client.generate("too slow", max_tokens=3500, ignore_eos=True)
            await until(lambda: held(fleet) == 0, 10)

    asyncio.run(scenario())
