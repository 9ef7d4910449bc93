"""What the dispatcher tells the router of a request, and learns from a first token."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from katydid_gateway.dispatch import Dispatch, Dispatcher
from katydid_gateway.engines import progress
from katydid_gateway.engines.frames import EnginePhase, EngineTrace
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.requests import CachedTokens
from katydid_gateway.routing.breaker import FAILURES
from katydid_gateway.routing.cost import Prediction, TierSpeeds
from katydid_gateway.routing.load import EngineState, RankState
from katydid_gateway.routing.prefix_index import Holder
from katydid_gateway.routing.router import Candidate, Router
from katydid_gateway.routing.tier_index import CacheTier
from katydid_runtime.errors import (
    DrainingError,
    EngineLostError,
    InternalError,
    InvalidRequestError,
    KatydidError,
    OverloadedError,
    UnavailableError,
)

from tests.gateway.mock_options import MockOptions
from tests.gateway.rig import rig, until

MIB = 2**20


def speeds_after(cached: CachedTokens, *fetches: tuple[str, float]) -> dict[CacheTier, float]:
    """The router's speeds after one answer whose blocks of 1 MiB were fetched in these phases (tier, seconds)."""
    router = Router()
    dispatcher, sent = dispatched(router)
    phases = tuple(EnginePhase("kvcache.fetch", b"", seconds, tier) for tier, seconds in fetches)
    dispatcher.first_token(sent, cached, EngineTrace(phases))
    return router.speeds.bytes_per_s


def dispatched(router: Router) -> tuple[Dispatcher, Dispatch]:
    """A request on its way to the one engine there is."""
    router.engines["e"] = EngineState("e", [RankState()], block_bytes=MIB)
    fleet: Any = SimpleNamespace(router=router)
    session: Any = None
    candidate = Candidate(Holder("e", 0), Prediction(0, 0, 0, 0, 0, 0), 0, 0)
    return Dispatcher(fleet, GatewayMetrics()), Dispatch(session, 1, candidate, 0)


def measured(tier: CacheTier, size: int, seconds: float) -> float:
    """The average after one fetch at that speed."""
    speeds = TierSpeeds()
    speeds.measured(tier, size, seconds)
    return speeds.bytes_per_s[tier]


@pytest.mark.parametrize(
    ("error", "retryable", "counts"),
    [
        (UnavailableError("a worker is ill"), True, True),
        (EngineLostError("it is gone"), True, True),
        (InternalError("a defect"), False, True),
        (OverloadedError("full"), True, False),
        (DrainingError("about to go"), True, False),
        (InvalidRequestError("the caller's fault"), False, False),
    ],
)
def test_a_refusal_that_says_nothing_of_an_engine_does_not_open_its_breaker(
    error: KatydidError, retryable: bool, counts: bool
) -> None:
    router = Router()
    dispatcher, sent = dispatched(router)
    for _ in range(FAILURES):
        dispatcher.failed(sent, error, retryable=retryable)
    assert router.engines["e"].breaker.is_open(time.monotonic()) is counts


def test_a_tiers_phases_count_together() -> None:
    cached = CachedTokens(device=128, memory=64 * 8, disk=64 * 4)
    found = speeds_after(cached, ("memory", 0.001), ("disk", 0.004), ("memory", 0.003))
    assert found[CacheTier.MEMORY] == pytest.approx(measured(CacheTier.MEMORY, 8 * MIB, 0.004))
    assert found[CacheTier.DISK] == pytest.approx(measured(CacheTier.DISK, 4 * MIB, 0.004))
    assert found[CacheTier.SHARED] == TierSpeeds().bytes_per_s[CacheTier.SHARED]


def test_an_unknown_tier_teaches_nothing() -> None:
    assert speeds_after(CachedTokens(device=64), ("tape", 1.0)) == TierSpeeds().bytes_per_s


@pytest.mark.parametrize(
    ("fields", "owed_s"),
    [
        ({}, 1.0),
        ({"priority": 50}, 1.0),
        ({"priority": -1}, None),
        ({"response_format": {"type": "regex", "pattern": ".*"}}, 1.0 + 2 * progress.GRAMMAR_S),
    ],
)
def test_a_first_token_is_owed_from_sending_to_its_coming(
    chatml: Path, fields: dict[str, Any], owed_s: float | None
) -> None:
    """Nothing is owed to a request that lets others go first."""

    async def scenario() -> None:
        async with rig(chatml, options=MockOptions(grammar_kinds=("regex",))) as built:
            (engine,), (state,) = built.engines, built.gateway.fleet.router.engines.values()
            engine.options.prefill_s = 60.0
            running = asyncio.create_task(built.chat(**fields))
            await until(lambda: engine.in_flight == 1)
            (rank,) = state.ranks
            now = asyncio.get_running_loop().time()
            assert len(rank.due) == (owed_s is not None)
            assert rank.late_s(now) == 0.0
            if owed_s is not None:
                assert rank.late_s(now + owed_s + 60.0) > 40.0
                assert rank.late_s(now + owed_s - 0.9) == 0.0
            engine.options.prefill_s = 0.0
            running.cancel()
            await until(lambda: engine.in_flight == 0)
            assert not rank.due

    asyncio.run(scenario())
