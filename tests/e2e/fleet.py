"""Three services as real processes on loopback that tests kill, freeze and start again one by one.

Unlike `katydid up`, nothing here restarts anything by itself: a test decides what lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from katydid.engine.v1 import engine_pb2
from katydid.engine.v1.engine_pb2_grpc import AdminServiceStub
from katydid.kvcache.v1 import kvcache_pb2
from katydid.kvcache.v1.kvcache_pb2_grpc import AdminServiceStub as CacheAdminStub
from katydid_cache import CacheClient, CacheStats
from katydid_cli.fleet.plan import HOST, free_ports

from tests.engine.engine_process import Service

__all__ = ["MODEL", "Fleet", "Process", "running_fleet"]

MODEL = "tiny"
SETTLE_S = 30.0
_SAMPLE = re.compile(r"^(\w+)(\{.*\})? (\S+)$", re.M)


class Process:
    """One service under fixed addresses; `start` runs it again after its death."""

    def __init__(self, module: str, folder: Path, *options: str, http: str) -> None:
        self.http = http
        self._module = module
        self._log = folder / f"{options[1].rpartition(':')[2]}-{module}.log"
        self._options = options
        self._service: Service | None = None
        self._frozen: list[int] = []

    @property
    def address(self) -> str:
        return self._options[1]

    @property
    def pids(self) -> list[int]:
        """Its process and its workers; empty while it is dead."""
        service = self._service
        return [] if service is None or service.process.poll() is not None else [service.process.pid, *self.workers]

    @property
    def workers(self) -> list[int]:
        assert self._service is not None
        return self._service.children()

    @property
    def ranks(self) -> list[int]:
        """An engine's workers that compute, rank by rank."""
        assert self._service is not None
        return self._service.ranks()

    def start(self, *, wait: bool = True) -> None:
        """Runs it; returns when it is ready, unless told not to wait."""
        self._service = Service(self._module, self._log, *self._options)
        if wait:
            self.ready()

    def ready(self) -> None:
        assert self._service is not None
        assert self._service.address == self.address

    def kill(self) -> None:
        """kill -9 of the service itself; returns when its workers are gone too."""
        assert self._service is not None
        workers = self.workers
        self._service.kill()
        self.thaw()
        deadline = time.monotonic() + 20
        while alive := [pid for pid in workers if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, f"workers {alive} outlive {self._module}"
            time.sleep(0.02)

    def kill_worker(self) -> None:
        """kill -9 of a worker, which ends the service too."""
        os.kill(self.ranks[0], signal.SIGKILL)

    def terminate(self) -> None:
        assert self._service is not None
        self._service.process.send_signal(signal.SIGTERM)

    def exit_code(self, timeout_s: float = 30.0) -> int:
        """Waits for its end."""
        assert self._service is not None
        return self._service.process.wait(timeout_s)

    def stop(self) -> None:
        self.thaw()
        if self._service is not None:
            self._service.stop()

    def freeze(self, pids: list[int] | None = None) -> None:
        """SIGSTOP to all of it, or to `pids`."""
        self._frozen = self.pids if pids is None else pids
        for pid in self._frozen:
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._frozen = []

    def revive(self) -> None:
        """Makes good what a failed test has left behind."""
        self.thaw()
        if not self.pids:
            self.start()

    def own_mib(self) -> float:
        """Resident memory that is not shared: staging buffers fill up once and are no leak."""
        status = "".join(Path(f"/proc/{pid}/status").read_text() for pid in self.pids)
        return sum(int(kib) for kib in re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.M)) / 1024

    def complaints(self) -> list[dict[str, object]]:
        """What it logged as an error, in all its lives."""
        lines = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["level"] in ("error", "critical")]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` that bear `labels`; 0 without any, but the service must know the name."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=30) as response:
            text = response.read().decode()
        assert f"# TYPE {name} " in text, f"{self._module} has no metric {name}"
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(value)
            for found, labelled, value in _SAMPLE.findall(text)
            if found == name and all(pair in labelled for pair in wanted)
        )


@dataclass(frozen=True)
class Fleet:
    """A KV-cache service with a disk tier, two engines that share it, a gateway before them."""

    kvcache: Process
    engines: dict[str, Process]
    gateway: Process
    expected_errors: set[str] = field(default_factory=set)
    """Messages that the test at hand expects in the logs."""

    @property
    def processes(self) -> list[Process]:
        return [self.kvcache, *self.engines.values(), self.gateway]

    @property
    def base_url(self) -> str:
        return f"http://{self.gateway.http}/v1"

    def other(self, engine: str) -> str:
        return next(name for name in self.engines if name != engine)

    def routed(self, engine: str) -> float:
        """Requests the gateway has sent to the engine."""
        return self.gateway.metric("katydid_gateway_routed_requests_total", engine=engine)

    def resumed(self, engine: str) -> float:
        """Choices begun on the engine that went on elsewhere."""
        return self.gateway.metric("katydid_gateway_resumed_choices_total", engine=engine)

    def connected(self) -> set[str]:
        """Engines whose session with the gateway is up, and which it holds for well."""
        up, ill = (f"katydid_gateway_{state}_engines" for state in ("connected", "ill"))
        ask = self.gateway.metric
        return {name for name in self.engines if ask(up, engine=name) and not ask(ill, engine=name)}

    async def whole(self) -> None:
        """Waits until the gateway has both engines and both engines the cache service."""

        def missing() -> list[str]:
            absent = sorted(self.engines.keys() - self.connected())
            for name, engine in self.engines.items():
                if not engine.metric("katydid_engine_attached_caches"):
                    absent.append(f"cache service of {name}")
            return absent

        await self._until_empty(missing)

    async def idle(self) -> None:
        """Waits until every gauge of work is 0 and every page and lease is given back."""

        def busy() -> list[str]:
            left = {"gateway requests": self.gateway.metric("katydid_gateway_in_flight_requests")}
            for name, engine in self.engines.items():
                for gauge in ("in_flight_requests", "running_choices", "waiting_choices"):
                    left[f"{name} {gauge}"] = engine.metric(f"katydid_engine_{gauge}")
                total, free = (engine.metric(f"katydid_engine_{kind}_pages") for kind in ("total", "free"))
                left[f"{name} pages"] = total - free
            return [f"{what}: {value:g}" for what, value in left.items() if value]

        await self._until_empty(busy)
        deadline = time.monotonic() + SETTLE_S
        while (stats := await self.cache_stats()).leases or stats.reservations:
            assert time.monotonic() < deadline, f"{stats.leases} leases, {stats.reservations} reservations are left"
            await asyncio.sleep(0.1)

    async def cache_stats(self) -> CacheStats:
        async with CacheClient(self.kvcache.address) as client:
            return await client.stats(timeout_s=10)

    async def flush_cache_to_disk(self) -> None:
        async with grpc.aio.insecure_channel(self.kvcache.address) as channel:
            await CacheAdminStub(channel).Flush(kvcache_pb2.FlushRequest(), timeout=30)

    async def empty_engines(self) -> None:
        """Drops every prefix that engines hold in their own pages."""
        for engine in self.engines.values():
            async with grpc.aio.insecure_channel(engine.address) as channel:
                await AdminServiceStub(channel).Flush(engine_pb2.FlushRequest(), timeout=30)

    async def _until_empty(self, left) -> None:
        deadline = time.monotonic() + SETTLE_S
        while found := await asyncio.to_thread(left):
            assert time.monotonic() < deadline, f"after {SETTLE_S:g} s still: {found}"
            await asyncio.sleep(0.1)


@contextlib.contextmanager
def running_fleet(model: Path, folder: Path, *, engine_options: tuple[str, ...] = ()) -> Iterator[Fleet]:
    """Starts the fleet in `folder`, and ends every process of it."""
    addresses = [f"{HOST}:{port}" for port in free_ports(8)]

    def process(module: str, *options: str) -> Process:
        listen, http = addresses.pop(), addresses.pop()
        return Process(module, folder, "--listen", listen, "--http-listen", http, *options, http=http)

    disk = ("--disk-path", str(folder / "disk"), "--disk-bytes", str(128 << 20), "--memory-bytes", str(64 << 20))
    kvcache = process("katydid_kvcache", *disk)
    caching = ("--kvcache-address", kvcache.address, "--kvcache-fetch", "always")
    engine = ("--model", str(model), "--threads", "1", *caching, *engine_options)
    engines = {name: process("katydid_engine", *engine) for name in ("engine-a", "engine-b")}
    where = ",".join(f"{name}={engine.address}" for name, engine in engines.items())
    gateway = process(
        *("katydid_gateway", "--model", str(model), "--engines", where, "--kvcache-address", kvcache.address),
    )
    fleet = Fleet(kvcache, engines, gateway)
    try:
        for service in fleet.processes:
            service.start(wait=False)
        for service in fleet.processes:
            service.ready()
        asyncio.run(fleet.whole())
        yield fleet
    finally:
        for service in reversed(fleet.processes):
            service.stop()
