"""The life of a gRPC server: bind, report health, drain on SIGTERM, stop.

    server = RpcServer(listen, services=["katydid.engine.v1.EngineService"], long_lived=["/…/Session"])
    add_EngineServiceServicer_to_server(servicer, server.grpc)
    async with server:                                         # released however the block ends
        await server.start()                                   # bound, NOT_SERVING: load the model now
        await server.run_until_signal(drain=servicer.drain)    # SERVING, until SIGTERM or SIGINT

Draining: health turns NOT_SERVING, new RPCs are refused with DrainingError (another process may take them), the
service's own `drain` and the RPCs in flight get `drain_timeout_s`, then everything left is cancelled. Streams that live
as long as the process (`long_lived`, health Watch) are not waited for: `drain` knows what matters inside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from katydid_runtime import log
from katydid_runtime.channel import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES
from katydid_runtime.errors import AddressInUseError, DrainingError, KatydidError, SettingsError
from katydid_runtime.exposition import split_address
from katydid_runtime.interceptors import AroundInterceptor, Context
from katydid_runtime.malformed import MalformedInterceptor
from katydid_runtime.rpc_errors import error_interceptor
from katydid_runtime.tls import ServerTls

__all__ = ["Admit", "RpcServer"]

_SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)

_REFUSAL_S = 0.1
_REFUSED_S = 0.2

_INFRASTRUCTURE = ("/grpc.health.", "/grpc.reflection.")

logger = logging.getLogger(__name__)

Admit: TypeAlias = Callable[[str, Iterable[tuple[str, str | bytes]]], None]


class RpcServer:
    """A grpc.aio server with Katydid's limits, error mapping, health, reflection and drain.

    `services` are the full names for health and reflection; `long_lived` the full methods ("/pkg.Service/Method") a
    drain does not wait for; `tls` is for TCP addresses, see `katydid_runtime.tls`; `admit` is called with method and
    metadata of every RPC and raises for one that is not to be; `reuse_port` lets several processes listen on one port;
    messages above `max_message_bytes` are refused before they are parsed. Register servicers on `grpc` before `start`.
    """

    def __init__(
        self,
        listen: str,
        *,
        services: Sequence[str],
        long_lived: Iterable[str] = (),
        drain_timeout_s: float = 30.0,
        tls: ServerTls | None = None,
        admit: Admit | None = None,
        reuse_port: bool = False,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.address = listen
        self._reuse_port = reuse_port
        self._services = tuple(services)
        self._long_lived = frozenset(long_lived)
        self._drain_timeout_s = drain_timeout_s
        self._credentials = None if tls is None else tls.credentials()
        self._admit = admit
        self._serving = False
        self._draining = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._health = health.aio.HealthServicer()
        self.grpc = grpc.aio.server(
            interceptors=(
                AroundInterceptor(_bind_request_id),
                error_interceptor(),
                AroundInterceptor(self._count, lambda method: not method.startswith(_INFRASTRUCTURE)),
                MalformedInterceptor(),
            ),
            options=_options(reuse_port, max_message_bytes),
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection(
            (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name), self.grpc
        )

    @property
    def in_flight(self) -> int:
        """RPCs running now, long-lived streams not counted."""
        return self._in_flight

    @property
    def serving(self) -> bool:
        """Whether health says SERVING: the answer for /readyz."""
        return self._serving

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.grpc.stop(grace=None)

    async def start(self) -> str:
        """Bind and accept connections, health still NOT_SERVING. Returns the address with the port really bound.

        Raises AddressInUseError naming the address, SettingsError for a malformed one.
        """
        await self.set_serving(False)
        self.address = self._bind(self.address)
        await self.grpc.start()
        return self.address

    async def set_serving(self, serving: bool) -> None:
        """Report health SERVING or NOT_SERVING for every service and for the process (""); READY is logged once."""
        if serving and not self._serving:
            logger.info("READY %s", self.address, extra={"address": self.address})
        self._serving = serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def run_until_signal(self, drain: Callable[[], Awaitable[None]] | None = None) -> None:
        """Report SERVING and serve until SIGTERM or SIGINT, then `shut_down`. A second signal cuts the drain short."""
        loop = asyncio.get_running_loop()
        first, second = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (second if first.is_set() else first).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        try:
            # Only now: whoever reads READY may send a signal at once.
            await self.set_serving(True)
            await first.wait()
            await self.shut_down(drain, cut_short=second)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def shut_down(
        self, drain: Callable[[], Awaitable[None]] | None = None, cut_short: asyncio.Event | None = None
    ) -> None:
        """Drain for at most `drain_timeout_s`, cancel what is left, and release the address."""
        started = time.monotonic()
        self._draining = True
        await self.set_serving(False)
        logger.info("draining", extra={"in_flight": self._in_flight, "drain_timeout_s": self._drain_timeout_s})
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(self._work_done(drain))]
        if cut_short is not None:
            waiting.append(asyncio.create_task(cut_short.wait()))
        done, pending = await asyncio.wait(waiting, timeout=self._drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            if error := task.exception():
                logger.error("drain failed", exc_info=error)
        left = self._in_flight
        # Calls that came as the last work ended are being refused: cut off now, they would hear of no reason.
        await self.grpc.stop(grace=None if left else _REFUSED_S)
        logger.info("stopped", extra={"cancelled": left, "drain_s": round(time.monotonic() - started, 3)})

    async def _work_done(self, drain: Callable[[], Awaitable[None]] | None) -> None:
        if drain is not None:
            await drain()
        await self._idle.wait()

    @asynccontextmanager
    async def _count(self, method: str, context: Context) -> AsyncIterator[None]:
        if self._draining:
            raise DrainingError(f"{self.address} is shutting down")
        if self._admit is not None:
            try:
                self._admit(method, context.invocation_metadata() or ())
            except KatydidError:
                # Guessing is slow, and a client that is writing a stream is done with its first messages: were the call
                # ended under its pen, it would see its write fail and not the reason.
                await asyncio.sleep(_REFUSAL_S)
                raise
        if method in self._long_lived:
            yield
            return
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _bind(self, address: str) -> str:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            _refuse_live_socket(path, address)
            where = address
        else:
            host, port = split_address(address)
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if not self._reuse_port:
                _refuse_taken_port(host, port, address)
        try:
            if self._credentials is None or address.startswith("unix:"):
                bound = self.grpc.add_insecure_port(where)
            else:
                bound = self.grpc.add_secure_port(where, self._credentials)
        except RuntimeError as error:
            raise AddressInUseError(
                f"cannot listen on {address}: it is in use or not an address of this host",
                field="listen",
                value=address,
            ) from error
        return address if address.startswith("unix:") else f"{where.rpartition(':')[0]}:{bound}"


def _options(reuse_port: bool, max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    # Without so_reuseport=0 a second process binds the same port and silently takes half of the connections.
    own = {"grpc.max_receive_message_length": max_message_bytes, "grpc.so_reuseport": int(reuse_port)}
    # Of an option that is there twice, gRPC takes the first.
    return tuple((dict(_SERVER_OPTIONS) | own).items())


def _refuse_taken_port(host: str, port: int, address: str) -> None:
    """gRPC would say so too, but with lines of its own on stderr."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise AddressInUseError(f"cannot listen on {address}: {reason}", field="listen", value=address) from error


def _refuse_live_socket(path: str, address: str) -> None:
    """gRPC replaces an existing socket file even while another process listens on it; a stale one may be replaced."""
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise SettingsError(f"cannot listen on {address}: its folder does not exist", field="listen", value=address)
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise AddressInUseError(f"cannot listen on {address}: another process does", field="listen", value=address)


@asynccontextmanager
async def _bind_request_id(_method: str, context: Context) -> AsyncIterator[None]:
    request_id = next((str(value) for key, value in context.invocation_metadata() or () if key == "x-request-id"), None)
    with log.bind(request=request_id):
        yield
