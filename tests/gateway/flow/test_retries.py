"""Retries are a share of the requests, and engines that fail theirs are left alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from katydid.engine.v1 import engine_pb2 as pb
from katydid_gateway.flow.retries import LEAST, MOST, SHARE, RetryBudget
from katydid_gateway.routing.breaker import FAILURES

from tests.gateway.rig import Rig, rig


@given(st.lists(st.booleans(), max_size=400))
def test_retries_never_exceed_their_share(events: list[bool]) -> None:
    budget, came, taken = RetryBudget(), 0, 0
    for first in events:
        if first:
            budget.came()
            came += 1
        elif budget.take():
            taken += 1
        assert taken <= LEAST + SHARE * came + 1e-6


def test_a_quiet_gateway_may_try_as_often_as_it_is_said_and_a_busy_one_saves_up_no_more_than_that() -> None:
    budget = RetryBudget()
    assert [budget.take() for _ in range(int(LEAST) + 1)] == [True] * int(LEAST) + [False]
    for _ in range(int(3 * MOST / SHARE)):
        budget.came()
    assert [budget.take() for _ in range(int(MOST) + 1)] == [True] * int(MOST) + [False]


def test_a_burst_that_meets_an_engine_as_it_begins_to_drain_goes_on_elsewhere(chatml: Path) -> None:
    """All of it: a rolling restart must not use up what is kept for engines that fail."""

    async def scenario(built: Rig) -> None:
        leaving, other = built.engines
        leaving.options.refusal = pb.RequestError(reason="DRAINING", message="the engine drains", retryable=True)
        answers = await asyncio.gather(*(built.chat(f"question {number} " * 3) for number in range(80)))
        assert {answer.status_code for answer in answers} == {200}
        assert len(leaving.submitted) > LEAST + SHARE * 80, "more than the budget has"
        assert len(other.submitted) == 80

    async def body() -> None:
        async with rig(chatml, engines=2) as built:
            await scenario(built)

    asyncio.run(body())


def test_an_engine_that_fails_its_requests_is_left_alone(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        bad, good = built.engines
        bad.options.refusal = pb.RequestError(reason="UNAVAILABLE", message="a worker is ill", retryable=True)
        for number in range(30):
            assert (await built.chat(f"question {number} " * 3)).status_code == 200
        assert FAILURES <= len(bad.submitted) <= FAILURES + 1
        assert len(good.submitted) == 30
        state = built.gateway.fleet.router.engines["engine-0"]
        bad.options.refusal = None
        state.breaker.open_until = 0.0
        for number in range(30):
            await built.chat(f"another {number} " * 3)
        assert len(bad.submitted) > FAILURES + 1
        assert state.breaker.failures == 0

    async def body() -> None:
        async with rig(chatml, engines=2) as built:
            await scenario(built)

    asyncio.run(body())


def test_what_every_engine_refuses_is_not_tried_for_ever(chatml: Path) -> None:
    """When all are ill, retries end with their budget, and somebody is still asked."""

    async def body() -> None:
        async with rig(chatml, engines=2) as built:
            for engine in built.engines:
                engine.options.refusal = pb.RequestError(reason="UNAVAILABLE", message="ill", retryable=True)
            for number in range(40):
                assert (await built.chat(f"question {number}")).status_code == 503
            submitted = sum(len(engine.submitted) for engine in built.engines)
            assert 40 <= submitted <= 40 + LEAST + SHARE * 60
            states = built.gateway.fleet.router.engines.values()
            assert all(state.breaker.failures >= FAILURES for state in states)

    asyncio.run(body())
