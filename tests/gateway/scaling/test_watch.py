"""The gauges of an autoscaler go on being set whatever went wrong in one look."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.routing.router import Router
from katydid_gateway.scaling import watch
from katydid_gateway.scaling.planner import ScalingTerms


def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(watch, "PERIOD_S", 0.0)
    looks = 0

    def queued() -> int:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ZeroDivisionError
        return 0

    async def scenario() -> None:
        scaling = watch.ScalingWatch(Router(), queued, GatewayMetrics(), ScalingTerms())
        running = asyncio.create_task(scaling.run())
        async with asyncio.timeout(30):
            while looks < 3:
                await asyncio.sleep(0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert [record.message for record in caplog.records] == ["the scaling plan failed"]
