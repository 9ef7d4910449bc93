"""Asks one engine how it is: one that hangs keeps its sockets open and would be waited for without end.

An engine whose step loop is stuck says NOT_SERVING; one that is stopped or cut off says nothing at all, which gRPC's
keepalive would notice after half a minute; one that is wedged says that it is well, and makes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from katydid_gateway.engines.progress import WEDGED, ProgressWatch

__all__ = ["HealthWatch"]

PERIOD_S = 1.0
TIMEOUT_S = 1.5
STUCK, SILENT = "not serving", "does not answer"
# How long an engine may be ill before its requests are given up: one that falls silent is found out within 5 s. One
# that says it is stuck has waited already.
PATIENCE_S = {STUCK: 1.5, SILENT: 3.5, WEDGED: 6.0}


class HealthWatch:
    """`ailment` is what is wrong with the engine, "" for nothing; `on_change` is called when that changes."""

    def __init__(self, channel: grpc.aio.Channel, on_change: Callable[[], None]) -> None:
        self.ailment = ""
        self._stub: Any = health_pb2_grpc.HealthStub(channel)
        self._on_change = on_change
        self._heard_at = 0.0
        self._draining = False
        self.progress = ProgressWatch()

    def heard(self, draining: bool) -> None:
        """A frame has come: as good as an answer. An engine that drains does not serve, and is well. One that goes on
        after all gets requests again at once, not with the next check."""
        self._heard_at = time.monotonic()
        self._draining = draining
        if self.ailment == WEDGED and not self.progress.wedged(self._heard_at):
            self.ailment = ""

    async def check(self) -> str:
        """Asks once."""
        asked_at = time.monotonic()
        try:
            answer = await self._stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return SILENT if self._heard_at < asked_at else ""
        if not self._draining and answer.status != health_pb2.HealthCheckResponse.SERVING:
            return STUCK
        return WEDGED if self.progress.wedged(time.monotonic()) else ""

    async def run(self) -> None:
        """Asks every second; returns once the engine has been ill for too long."""
        ill_since: float | None = None
        while True:
            asked_at = time.monotonic()
            ailment = await self.check()
            if ailment != self.ailment:
                self.ailment = ailment
                self._on_change()
            if not ailment:
                ill_since = None
            elif ill_since is None:
                ill_since = asked_at
            elif time.monotonic() - ill_since > PATIENCE_S[ailment]:
                return
            await asyncio.sleep(PERIOD_S)
