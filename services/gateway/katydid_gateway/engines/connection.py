"""One configured engine: who it says it is, whether that fits this gateway, and its session while it does.

An engine that fails the parity check (parity.py) is refused with a log line and a metric, and asked again later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import grpc
from katydid.engine.v1 import engine_pb2 as pb
from katydid.engine.v1.engine_pb2_grpc import EngineServiceStub
from katydid_runtime.channel import CHANNEL_OPTIONS, open_channel
from katydid_runtime.duration import to_seconds
from katydid_runtime.errors import IdentityMismatchError, KatydidError, UnavailableError
from katydid_runtime.rpc_errors import from_rpc_error
from katydid_runtime.tls import Tls

from katydid_gateway.engines.block_events import follow_engine
from katydid_gateway.engines.engine_session import EngineSession
from katydid_gateway.engines.health import HealthWatch
from katydid_gateway.engines.parity import Parity
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.routing.breaker import Breaker
from katydid_gateway.routing.load import EngineState, RankReport, RankState
from katydid_gateway.routing.router import Router
from katydid_gateway.settings import EngineAddress

__all__ = ["EngineConnection"]

DESCRIBE_TIMEOUT_S = 5.0
RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
REFUSED_RETRY_S = 5.0
CACHE_LOOK_S = 5.0
# gRPC's own back-off grows to two minutes; a restarted engine should be back within a second.
_RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_ROLES = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}

logger = logging.getLogger(__name__)


class EngineConnection:
    """Keeps one engine described, checked and connected; it is the session's observer.

    `admit` raises IdentityMismatchError when the engine does not belong into this fleet.
    """

    def __init__(
        self,
        where: EngineAddress,
        router: Router,
        metrics: GatewayMetrics,
        *,
        tls: Tls | None,
        client: str,
        parity: Parity,
        admit: Callable[[EngineConnection, pb.DescribeResponse], None],
        transport_delay_s: float = 0.0,
    ) -> None:
        self.name = where.name
        self.address = where.address
        self.description: pb.DescribeResponse | None = None
        self.session: EngineSession | None = None
        self._router = router
        self._metrics = metrics
        self._client = client
        self._parity = parity
        self._admit = admit
        self._delay_s = transport_delay_s
        self._channel = open_channel(where.address, tls, (*CHANNEL_OPTIONS, *_RECONNECT))
        self._state = router.engines[where.name] = EngineState(where.name)
        self._health = HealthWatch(self._channel, self._exclude)
        self._absence = "not connected"
        self._abandoned = ""

    @property
    def ready(self) -> bool:
        """Whether requests may be sent to it."""
        return not self._state.excluded

    async def run(self) -> None:
        """Keep connected until cancelled."""
        failures = 0
        try:
            while True:
                try:
                    description = await self._describe()
                except IdentityMismatchError as error:
                    self._refused(error)
                    await asyncio.sleep(REFUSED_RETRY_S)
                    continue
                except KatydidError as error:
                    if failures == 0:
                        logger.info("engine is away", extra={"engine": self.name, "error": str(error)})
                    await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                    failures += 1
                    continue
                failures = 0
                try:
                    await self._attend(description)
                except Exception:
                    # A defect met on one engine's stream must not cost the fleet that engine for good.
                    logger.exception("session failed", extra={"engine": self.name})
                    await asyncio.sleep(REFUSED_RETRY_S)
        finally:
            await self._channel.close()

    def on_connected(self) -> None:
        self._absence = ""
        self._exclude()
        self._metrics.connected.labels(self.name).set(1)
        logger.info("engine connected", extra={"engine": self.name, "address": self.address})

    def on_disconnected(self) -> None:
        self._absence = "not connected"
        self._state.draining = False
        self._exclude()
        self._metrics.connected.labels(self.name).set(0)

    def on_state(self, reports: Mapping[int, RankReport], *, draining: bool, role: pb.Role.ValueType) -> None:
        self._health.progress.reported(sum(report.uncached_tokens for report in reports.values()), time.monotonic())
        self._health.heard(draining)
        self._state.role, self._state.draining = _ROLES.get(role, "both"), draining
        self._absence = "draining" if draining else ""
        self._exclude()
        self._state.reported(reports, time.monotonic())

    def _exclude(self) -> None:
        self._state.excluded = self._absence or self._health.ailment
        self._state.well = not self._state.excluded
        self._metrics.ill.labels(self.name).set(bool(self._health.ailment) and self.session is not None)

    async def _describe(self) -> pb.DescribeResponse:
        description = await self._asked()
        await self._parity.check(self.name, description)
        if ailment := await self._health.check():
            raise UnavailableError(f"engine {self.name}: {ailment}")
        self._admit(self, description)
        return description

    async def _asked(self) -> pb.DescribeResponse:
        try:
            return await EngineServiceStub(self._channel).Describe(
                pb.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S, wait_for_ready=True
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def _follow_cache(self) -> None:
        """An engine may find its cache service, or lose it, at any time."""
        while True:
            await asyncio.sleep(CACHE_LOOK_S)
            try:
                self._learn_cache(await self._asked())
            except KatydidError as error:
                logger.debug("engine did not describe itself", extra={"engine": self.name, "error": str(error)})

    def _learn_cache(self, description: pb.DescribeResponse) -> None:
        self._state.kv_cache_attached = description.kv_cache_attached
        self._state.near = description.kvcache_instance

    async def _attend(self, description: pb.DescribeResponse) -> None:
        self.description = description
        self._state.ranks = [RankState() for _ in range(max(1, description.dp_ranks))]
        self._state.block_bytes = description.block_bytes
        self._state.since = time.monotonic()
        self._state.breaker = Breaker()
        self._learn_cache(description)
        # It has just said that it is well: what was wrong with it in its last session is over.
        self._health = HealthWatch(self._channel, self._exclude)
        self.session = EngineSession(
            self.name,
            self.address,
            self._channel,
            client=self._client,
            boot_id=description.boot_id,
            reattach_window_s=to_seconds(description.reattach_window),
            observer=self,
            progress=self._health.progress,
            abandoned=self._abandoned,
            transport_delay_s=self._delay_s,
        )
        watch = asyncio.create_task(follow_engine(self.name, len(self._state.ranks), self._channel, self._router.index))
        session = asyncio.create_task(self.session.run())
        health = asyncio.create_task(self._health.run())
        cache = asyncio.create_task(self._follow_cache())
        try:
            await asyncio.wait((session, health), return_when=asyncio.FIRST_COMPLETED)
            if session.done():
                session.result()
            else:
                why = self._health.ailment
                logger.error("engine hangs, its requests are given up", extra={"engine": self.name, "ailment": why})
        finally:
            tasks = (session, health, watch, cache)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._abandoned = self.session.abandoned
            self.session = None
            self.description = None
            self._router.forget(self.name)

    def _refused(self, error: IdentityMismatchError) -> None:
        absence = f"refused: {error.message}"
        # It is asked every few seconds: what has been said already is only counted.
        if absence != self._absence:
            logger.error("engine refused", extra={"engine": self.name, "reason": error.message, "field": error.field})
        self._absence = absence
        self._exclude()
        self._metrics.refused.labels(self.name, error.field or "").inc()
