"""A whole gateway: text, fleet, HTTP and gRPC put together, started in order and drained in order."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from katydid.gateway.v1 import admin_pb2, gateway_pb2
from katydid.gateway.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from katydid.gateway.v1.gateway_pb2_grpc import add_InferenceServiceServicer_to_server
from katydid_runtime.exposition import Exposition
from katydid_runtime.metric_aliases import MetricAliases
from katydid_runtime.server import RpcServer
from katydid_runtime.telemetry import Telemetry

from katydid_gateway.access.door import Door
from katydid_gateway.access.tokens import TokenVerifier
from katydid_gateway.admin_service import AdminServicer
from katydid_gateway.api_keys import load_api_keys
from katydid_gateway.capture import Capture
from katydid_gateway.engines.fleet import Fleet
from katydid_gateway.engines.parity import Parity
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.generation import Generator
from katydid_gateway.http.app import http_app
from katydid_gateway.http.server import HttpServer
from katydid_gateway.lifeline import Lifeline
from katydid_gateway.posture import log_posture
from katydid_gateway.routing.prefix_index import PrefixIndex
from katydid_gateway.routing.router import Router
from katydid_gateway.routing.tier_index import TierIndex
from katydid_gateway.scaling.planner import ScalingTerms
from katydid_gateway.scaling.watch import ScalingWatch
from katydid_gateway.service import InferenceServicer
from katydid_gateway.settings import GatewaySettings
from katydid_gateway.text.model_text import ModelText, load_model_text
from katydid_gateway.vllm_names import VLLM_NAMES

__all__ = ["Gateway"]

_SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
# What gRPC puts around a prompt of the largest size.
_MESSAGE_ROOM = 2**20

CUT_BEFORE_S = 1.0

logger = logging.getLogger(__name__)


class Gateway:
    """One gateway process: `load` or build it inside the event loop, then `run`, or `start` and `stop` it."""

    def __init__(self, settings: GatewaySettings, text: ModelText, door: Door, telemetry: Telemetry) -> None:
        self._settings = settings
        metrics = GatewayMetrics(several_processes=settings.process_pipe is not None)
        if settings.vllm_metric_names:
            labels = {"engine": "all", "model_name": Path(settings.model).resolve().name}
            metrics.registry.register(MetricAliases(metrics.registry, VLLM_NAMES, labels))
        share = settings.index_bytes // 4
        router = Router(index=PrefixIndex(settings.index_bytes - share), tiers=TierIndex(share))
        self.fleet = Fleet(settings, router, metrics, Parity(text))
        capture = Capture(settings.capture_file, settings.capture_bytes) if settings.capture_file else None
        self._capture = capture
        self.generator = Generator(settings, text, self.fleet, door, telemetry, metrics, capture)
        terms = ScalingTerms(start_s=settings.scaling_start_s, hold_s=settings.scaling_hold_s)
        queue = self.generator.flow.gate.queue
        self.scaling = ScalingWatch(self.fleet.router, lambda: queue.cost, metrics, terms)
        self._scaling_task: asyncio.Task[None] | None = None
        tls = settings.server_tls()
        self.door = door
        door.on_refused = lambda error: metrics.turned_away.labels(error.reason.lower()).inc()
        self._shared = settings.processes > 1
        self._rpc = RpcServer(
            settings.listen,
            services=[_SERVICE],
            drain_timeout_s=settings.drain_timeout_s,
            tls=tls,
            reuse_port=self._shared,
            max_message_bytes=settings.max_body_bytes + _MESSAGE_ROOM,
        )
        servicer = InferenceServicer(self.generator, door, settings.max_body_bytes)
        add_InferenceServiceServicer_to_server(servicer, self._rpc.grpc)
        self._http = HttpServer(http_app(settings, self.generator, self.fleet, door, metrics), tls)
        self._probes = Exposition(metrics.metrics, lambda: self.fleet.ready and not self.generator.draining)
        self._admin: RpcServer | None = None
        if settings.admin_listen is not None:
            self._admin = RpcServer(settings.admin_listen, services=[_ADMIN], drain_timeout_s=0, tls=tls)
            add_AdminServiceServicer_to_server(AdminServicer(settings, self.generator, door), self._admin.grpc)
        self._lifeline: asyncio.Task[None] | None = None
        self.http_address = self.grpc_address = self.admin_address = ""

    @classmethod
    async def load(cls, settings: GatewaySettings, telemetry: Telemetry) -> Gateway:
        """Read the model folder, the key file and the keys of tokens first. Raises SettingsError and its kind."""
        settings.check()
        terms = settings.token_terms()
        tokens = None if terms is None else TokenVerifier(terms)
        if tokens is not None:
            await tokens.load()
        settings = settings.of_one_process()
        door = Door(
            load_api_keys(settings.api_keys_file),
            tokens,
            max_requests=settings.max_requests,
            per_tenant=settings.max_requests_per_tenant,
            shares=settings.shares,
        )
        text = await asyncio.to_thread(
            load_model_text, settings.model, tool_format=settings.tool_format, cache_bytes=settings.token_cache_bytes
        )
        return cls(settings, text, door, telemetry)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then finish what is in flight within the drain timeout."""
        try:
            await self.start()
            await self._rpc.run_until_signal(self._drain)
        finally:
            await self._close()

    async def start(self) -> None:
        """Listen on both addresses and connect to the engines. Raises AddressInUseError, SettingsError."""
        self.http_address = await self._http.start(self._settings.http_listen, reuse_port=self._shared)
        self.grpc_address = await self._rpc.start()
        if self._settings.probe_listen is not None:
            await self._probes.start(self._settings.probe_listen, reuse_port=self._shared)
        if self._admin is not None:
            self.admin_address = await self._admin.start()
            await self._admin.set_serving(True)
        self.fleet.start()
        self._scaling_task = asyncio.create_task(self.scaling.run())
        if self._settings.process_pipe is not None:
            self._lifeline = asyncio.create_task(Lifeline(self._settings.process_pipe).run())
        else:
            log_posture(self._settings)
        logger.info(
            "HTTP on %s",
            self.http_address,
            extra={"http_address": self.http_address, "admin_address": self.admin_address},
        )

    async def stop(self) -> None:
        """Drain and close, as a signal would."""
        await self._rpc.shut_down(self._drain)
        await self._close()

    async def _drain(self) -> None:
        """Wait for what is in flight; a second before the server's patience ends, tell the rest that it is cut."""
        self.generator.draining = True
        try:
            async with asyncio.timeout(max(0.0, self._settings.drain_timeout_s - CUT_BEFORE_S)):
                await self.generator.idle.wait()
        except TimeoutError:
            self.generator.cut()
            await self.generator.idle.wait()

    async def _close(self) -> None:
        if self._scaling_task is not None:
            self._scaling_task.cancel()
            await asyncio.gather(self._scaling_task, return_exceptions=True)
        await self.fleet.stop()
        if self._admin is not None:
            await self._admin.grpc.stop(grace=None)
        await self._http.stop()
        await self._probes.stop()
        if self._lifeline is not None:
            self._lifeline.cancel()
        if self._capture is not None:
            self._capture.close()
