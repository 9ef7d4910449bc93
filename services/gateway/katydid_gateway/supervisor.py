"""The parent of several gateway processes on the same ports: starts them, again when they die or hang, drains all.

The kernel spreads connections over the processes (SO_REUSEPORT). They share their metrics, and nothing else: each has
its own index, queue and part of the budgets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from katydid.gateway.v1 import admin_pb2
from katydid.gateway.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from katydid_runtime.errors import AddressInUseError, SettingsError
from katydid_runtime.exposition import split_address
from katydid_runtime.metrics import SHARED_METRICS
from katydid_runtime.process_folder import process_folder
from katydid_runtime.server import RpcServer

from katydid_gateway.admin_relay import AdminRelay
from katydid_gateway.lifeline import READY
from katydid_gateway.posture import log_posture
from katydid_gateway.settings import GatewaySettings

__all__ = ["Supervisor"]

# A process whose loop stands still so long is killed; those that are loading a model folder have more time.
SILENCE_S = 30.0
START_S = 120.0
# A process that lived so long may start again at once.
_LIVED_S = 10.0
_BACK_OFF_S = (0.1, 0.5, 2.0, 5.0)
_MISCONFIGURED = 2
_STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)
# What a process may take beyond its drain.
_KILL_AFTER_S = 10.0

ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

_PORTS = {"listen": "--listen", "http_listen": "--http-listen", "probe_listen": "--probe-listen"}

logger = logging.getLogger(__name__)


class Supervisor:
    """`words` are the command line that the processes get too."""

    def __init__(self, settings: GatewaySettings, words: Sequence[str]) -> None:
        if settings.listen.startswith("unix:"):
            raise SettingsError(
                "several processes cannot share a Unix socket",
                field="listen",
                value=settings.listen,
                allowed="host:port",
            )
        self._settings = settings
        self._words = tuple(words)
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._ready: set[int] = set()
        self._relay: AdminRelay | None = None
        self._stopping = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        """Until SIGTERM or SIGINT, or until no process can start; returns the exit code. Raises AddressInUseError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            async with contextlib.AsyncExitStack() as held:
                shared = str(held.enter_context(process_folder("katydid-gateway-")))
                words = [*self._words]
                for name, option in _PORTS.items():
                    if (address := getattr(self._settings, name)) is not None:
                        words += [option, held.enter_context(_held(name, address))]
                log_posture(self._settings)
                if self._settings.admin_listen is not None:
                    self._relay = AdminRelay(self._settings, shared, lambda: self._running)
                    await held.enter_async_context(_admin(self._settings, self._relay))
                await asyncio.gather(*(self._keep(number, words, shared) for number in range(self._settings.processes)))
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return self._code

    async def _keep(self, number: int, words: Sequence[str], shared: str) -> None:
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._one(number, words, shared)
            if self._stopping.is_set():
                # One that was told to stop while it loaded has done so.
                self._code = self._code or (0 if code in _STOPPED else code)
                return
            if code == _MISCONFIGURED and number not in self._ready:
                # It has said why; the others would say the same.
                self._code = code
                self._stop()
                return
            failures = 0 if time.monotonic() - began > _LIVED_S else failures + 1
            logger.error("a gateway process ended", extra={"number": number, "code": code})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)])
            await self._may_start()

    async def _may_start(self) -> None:
        """While the gateway drains nobody takes the place of one that has ended."""
        if self._relay is not None:
            waits = [asyncio.create_task(event.wait()) for event in (self._stopping, self._relay.may_start)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _one(self, number: int, words: Sequence[str], shared: str) -> int:
        """One life of a process; returns its exit code."""
        read, write = os.pipe()
        async with self._relay.turn if self._relay is not None else contextlib.nullcontext():
            try:
                process = await asyncio.create_subprocess_exec(
                    *("env", f"{SHARED_METRICS}={shared}", sys.executable, "-m", "katydid_gateway", *words),
                    *(self._relay.words(number) if self._relay is not None else ()),
                    *("--process-pipe", str(write)),
                    pass_fds=[write],
                )
            finally:
                os.close(write)
            self._running[number] = process
        if self._stopping.is_set():
            process.terminate()
        watch = asyncio.create_task(self._watch(number, process, read))
        try:
            return await process.wait()
        finally:
            del self._running[number]
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            _forget_metrics(shared, process.pid)

    async def _watch(self, number: int, process: asyncio.subprocess.Process, pipe: int) -> None:
        """Reads its signs of life; a process without any is killed."""
        reader = asyncio.StreamReader()
        file = os.fdopen(pipe, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), file
        )
        patience_s = START_S
        try:
            while True:
                async with asyncio.timeout(patience_s):
                    signs = await reader.read(4096)
                if not signs:
                    return
                if READY in signs:
                    self._is_ready(number)
                patience_s = SILENCE_S
        except TimeoutError:
            logger.error("a gateway process hangs and is killed", extra={"number": number, "pid": process.pid})
            process.kill()
        finally:
            transport.close()

    def _is_ready(self, number: int) -> None:
        self._ready.add(number)
        if len(self._ready) == self._settings.processes:
            logger.info("all %d processes are ready", self._settings.processes)

    def _stop(self) -> None:
        """The first signal drains all, another cuts the drain short, as it does for one."""
        self._stopping.set()
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        patience_s = self._settings.drain_timeout_s + _KILL_AFTER_S
        asyncio.get_running_loop().call_later(patience_s, self._kill)

    def _kill(self) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()


@contextlib.asynccontextmanager
async def _admin(settings: GatewaySettings, relay: AdminRelay) -> AsyncIterator[None]:
    """Serves the relay on the gateway's own admin address. Raises AddressInUseError."""
    assert settings.admin_listen is not None
    server = RpcServer(settings.admin_listen, services=[ADMIN_SERVICE], drain_timeout_s=0, tls=settings.server_tls())
    add_AdminServiceServicer_to_server(relay, server.grpc)
    try:
        address = await server.start()
        await server.set_serving(True)
        logger.info("AdminService of all processes on %s", address, extra={"admin_address": address})
        yield
    finally:
        await server.grpc.stop(grace=None)
        await relay.close()


@contextlib.contextmanager
def _held(name: str, address: str) -> Iterator[str]:
    """An address with its port chosen, which nobody else can take while the processes come and go."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # Another gateway may not be joined by mistake: the port must be nobody's first.
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
        holder = socket.socket(family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, port))
    except OSError as error:
        raise AddressInUseError(f"cannot listen on {address}: {error.strerror}", field=name, value=address) from error
    with holder:
        yield f"[{host}]:{holder.getsockname()[1]}" if ":" in host else f"{host}:{holder.getsockname()[1]}"


def _forget_metrics(folder: str, pid: int) -> None:
    """Figures of what a dead process was doing; what it has done still counts."""
    for path in Path(folder).glob(f"gauge_live*_{pid}.db"):
        path.unlink(missing_ok=True)
