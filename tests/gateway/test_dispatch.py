"""What the dispatcher learns from a first token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from katydid_gateway.dispatch import Dispatch, Dispatcher
from katydid_gateway.engines.frames import EnginePhase, EngineTrace
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.requests import CachedTokens
from katydid_gateway.routing.cost import Prediction, TierSpeeds
from katydid_gateway.routing.load import EngineState, RankState
from katydid_gateway.routing.prefix_index import Holder
from katydid_gateway.routing.router import Candidate, Router
from katydid_gateway.routing.tier_index import CacheTier

MIB = 2**20


def speeds_after(cached: CachedTokens, *fetches: tuple[str, float]) -> dict[CacheTier, float]:
    """The router's speeds after one answer whose blocks of 1 MiB were fetched in these phases (tier, seconds)."""
    router = Router()
    router.engines["e"] = EngineState("e", [RankState()], block_bytes=MIB)
    fleet: Any = SimpleNamespace(router=router)
    session: Any = None
    candidate = Candidate(Holder("e", 0), Prediction(0, 0, 0, 0, 0, 0), 0, 0)
    phases = tuple(EnginePhase("kvcache.fetch", b"", seconds, tier) for tier, seconds in fetches)
    Dispatcher(fleet, GatewayMetrics()).first_token(Dispatch(session, 1, candidate, 0), cached, EngineTrace(phases))
    return router.speeds.bytes_per_s


def measured(tier: CacheTier, size: int, seconds: float) -> float:
    """The average after one fetch at that speed."""
    speeds = TierSpeeds()
    speeds.measured(tier, size, seconds)
    return speeds.bytes_per_s[tier]


def test_a_tiers_phases_count_together() -> None:
    cached = CachedTokens(device=128, memory=64 * 8, disk=64 * 4)
    found = speeds_after(cached, ("memory", 0.001), ("disk", 0.004), ("memory", 0.003))
    assert found[CacheTier.MEMORY] == pytest.approx(measured(CacheTier.MEMORY, 8 * MIB, 0.004))
    assert found[CacheTier.DISK] == pytest.approx(measured(CacheTier.DISK, 4 * MIB, 0.004))
    assert found[CacheTier.SHARED] == TierSpeeds().bytes_per_s[CacheTier.SHARED]


def test_an_unknown_tier_teaches_nothing() -> None:
    assert speeds_after(CachedTokens(device=64), ("tape", 1.0)) == TierSpeeds().bytes_per_s
