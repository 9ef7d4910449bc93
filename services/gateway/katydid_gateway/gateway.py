"""A whole gateway: text, fleet, HTTP and gRPC put together, started in order and drained in order."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from katydid.gateway.v1 import gateway_pb2
from katydid.gateway.v1.gateway_pb2_grpc import add_InferenceServiceServicer_to_server
from katydid_runtime.exposition import Exposition
from katydid_runtime.metric_aliases import MetricAliases
from katydid_runtime.server import RpcServer
from katydid_runtime.telemetry import Telemetry

from katydid_gateway.api_keys import ApiKeys, load_api_keys
from katydid_gateway.capture import Capture
from katydid_gateway.engines.fleet import Fleet
from katydid_gateway.engines.parity import Parity
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.generation import Generator
from katydid_gateway.http.app import http_app
from katydid_gateway.http.server import HttpServer
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

CUT_BEFORE_S = 1.0

logger = logging.getLogger(__name__)


class Gateway:
    """One gateway process: `load` or build it inside the event loop, then `run`, or `start` and `stop` it."""

    def __init__(self, settings: GatewaySettings, text: ModelText, keys: ApiKeys, telemetry: Telemetry) -> None:
        self._settings = settings
        metrics = GatewayMetrics()
        if settings.vllm_metric_names:
            labels = {"engine": "all", "model_name": Path(settings.model).resolve().name}
            metrics.registry.register(MetricAliases(metrics.registry, VLLM_NAMES, labels))
        share = settings.index_bytes // 4
        router = Router(index=PrefixIndex(settings.index_bytes - share), tiers=TierIndex(share))
        self.fleet = Fleet(settings, router, metrics, Parity(text))
        capture = Capture(settings.capture_file, settings.capture_bytes) if settings.capture_file else None
        self._capture = capture
        self.generator = Generator(settings, text, self.fleet, keys, telemetry, metrics, capture)
        terms = ScalingTerms(start_s=settings.scaling_start_s, hold_s=settings.scaling_hold_s)
        queue = self.generator.flow.gate.queue
        self.scaling = ScalingWatch(self.fleet.router, lambda: queue.cost, metrics, terms)
        self._scaling_task: asyncio.Task[None] | None = None
        tls = settings.server_tls()
        self._rpc = RpcServer(settings.listen, services=[_SERVICE], drain_timeout_s=settings.drain_timeout_s, tls=tls)
        servicer = InferenceServicer(self.generator, keys, settings.max_body_bytes)
        add_InferenceServiceServicer_to_server(servicer, self._rpc.grpc)
        self._http = HttpServer(http_app(settings, self.generator, self.fleet, keys, metrics), tls)
        self._probes = Exposition(metrics.metrics, lambda: self.fleet.ready and not self.generator.draining)
        self.http_address = self.grpc_address = self.probe_address = ""

    @classmethod
    async def load(cls, settings: GatewaySettings, telemetry: Telemetry) -> Gateway:
        """Read the model folder and the key file first. Raises SettingsError and its kind."""
        text = await asyncio.to_thread(
            load_model_text, settings.model, tool_format=settings.tool_format, cache_bytes=settings.token_cache_bytes
        )
        return cls(settings, text, load_api_keys(settings.api_keys_file), telemetry)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then finish what is in flight within the drain timeout."""
        try:
            await self.start()
            await self._rpc.run_until_signal(self._drain)
        finally:
            await self._close()

    async def start(self) -> None:
        """Listen on both addresses and connect to the engines. Raises AddressInUseError, SettingsError."""
        self.http_address = await self._http.start(self._settings.http_listen)
        self.grpc_address = await self._rpc.start()
        if self._settings.probe_listen is not None:
            self.probe_address = await self._probes.start(self._settings.probe_listen)
        self.fleet.start()
        self._scaling_task = asyncio.create_task(self.scaling.run())
        logger.info("HTTP on %s", self.http_address, extra={"http_address": self.http_address})

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
        await self._http.stop()
        await self._probes.stop()
        if self._capture is not None:
            self._capture.close()
