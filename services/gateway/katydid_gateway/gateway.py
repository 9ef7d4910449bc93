"""A whole gateway: text, fleet, HTTP and gRPC put together, started in order and drained in order."""

from __future__ import annotations

import logging

from katydid.gateway.v1 import gateway_pb2
from katydid.gateway.v1.gateway_pb2_grpc import add_InferenceServiceServicer_to_server
from katydid_runtime.server import RpcServer
from katydid_runtime.telemetry import Telemetry

from katydid_gateway.api_keys import ApiKeys, load_api_keys
from katydid_gateway.engines.fleet import Fleet
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.generation import Generator
from katydid_gateway.http.app import http_app
from katydid_gateway.http.server import HttpServer
from katydid_gateway.routing.router import Router
from katydid_gateway.service import InferenceServicer
from katydid_gateway.settings import GatewaySettings
from katydid_gateway.text.model_text import ModelText, load_model_text

__all__ = ["Gateway"]

logger = logging.getLogger(__name__)


class Gateway:
    """One gateway process. Build it with `load`, then `run` it."""

    def __init__(self, settings: GatewaySettings, text: ModelText, keys: ApiKeys, telemetry: Telemetry) -> None:
        self._settings = settings
        self._text = text
        self._keys = keys
        self._telemetry = telemetry
        self._metrics = GatewayMetrics()

    @classmethod
    def load(cls, settings: GatewaySettings, telemetry: Telemetry) -> Gateway:
        """Read the model folder and the key file. Raises SettingsError and its kind."""
        text = load_model_text(settings.model, tool_format=settings.tool_format, cache_bytes=settings.token_cache_bytes)
        return cls(settings, text, load_api_keys(settings.api_keys_file), telemetry)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then finish what is in flight within the drain timeout."""
        settings = self._settings
        fleet = Fleet(settings, Router(), self._metrics, self._text.digest)
        generator = Generator(settings, self._text, fleet, self._telemetry, self._metrics)
        service = gateway_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
        rpc = RpcServer(settings.listen, services=[service], drain_timeout_s=settings.drain_timeout_s)
        add_InferenceServiceServicer_to_server(
            InferenceServicer(generator, self._keys, settings.max_body_bytes), rpc.grpc
        )
        http = HttpServer(http_app(settings, generator, fleet, self._keys, self._metrics))

        async def drain() -> None:
            generator.draining = True
            await generator.idle.wait()

        http_address = await http.start(settings.http_listen)
        try:
            await rpc.start()
            fleet.start()
            logger.info("HTTP on %s", http_address, extra={"http_address": http_address})
            await rpc.set_serving(True)
            await rpc.run_until_signal(drain)
        finally:
            await fleet.stop()
            await http.stop()
