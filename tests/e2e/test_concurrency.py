"""Sixty-four streams at once, over HTTP and gRPC: each gets what it would have got alone."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.load import Answer, Load, mixed_asks

pytestmark = pytest.mark.e2e


def test_64_streams_at_once_equal_one_at_a_time(fleet: Fleet) -> None:
    asks = mixed_asks(64, seed=1)

    async def scenario() -> None:
        async with Load(fleet) as load:
            alone = await load.one_at_a_time(asks)
            assert all(isinstance(answer, Answer) for answer in alone), alone
            together = await load.all_at_once(asks)
            wrong = [(ask, one, other) for ask, one, other in zip(asks, alone, together, strict=True) if one != other]
            assert not wrong, f"{len(wrong)} differ, first: {wrong[0]}"
            assert sum(answer.output_tokens for answer in alone if isinstance(answer, Answer)) > 1000
            await fleet.idle()

    asyncio.run(scenario())
    assert min(fleet.routed(name) for name in fleet.engines) > 20, "both engines work"
