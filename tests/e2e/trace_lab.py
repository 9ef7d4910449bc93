"""Traced services as real processes, and variants of each that are slow in its phases, so that a test can see which
phases of a request grow, and by how much."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from katydid.engine.v1 import engine_pb2
from katydid.engine.v1.engine_pb2_grpc import AdminServiceStub
from katydid.kvcache.v1 import kvcache_pb2
from katydid.kvcache.v1.kvcache_pb2_grpc import AdminServiceStub as CacheAdminStub
from katydid.kvcache.v1.kvcache_pb2_grpc import KvCacheServiceStub
from katydid_cli.fleet.plan import HOST, free_ports
from katydid_cli.tracing.spans import Span, choose_trace, read_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from tests.e2e.fleet import Process

__all__ = ["DELAYS_MS", "Collector", "Lab", "Line", "running_lab"]

PATIENCE_S = 60.0
# How slow each service is made in which phase, so differently that no phase can be taken for another.
DELAYS_MS = {
    "gateway": {"tokenise": 150, "route": 300, "transport": 500},
    "engine": {"queue": 150, "prefill": 500, "decode": 300},
    "kvcache": {"lookup": 150, "fetch": 300},
}
# What a service calls the point of a delay where it is not the phase.
_POINTS = {"fetch": "get"}


class Collector(TraceServiceServicer):
    """An OTLP endpoint that keeps what it is sent."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://{HOST}:{self._server.add_insecure_port(f'{HOST}:0')}"
        self._server.start()

    def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
        self.received.append(request)
        return ExportTraceServiceResponse()

    def spans(self, trace_id: str) -> dict[str, tuple[str, str, str, frozenset[str]]]:
        """By span id: service, name, parent and links."""
        return {
            span.span_id.hex(): (
                next(pair.value.string_value for pair in part.resource.attributes if pair.key == "service.name"),
                span.name,
                span.parent_span_id.hex(),
                frozenset(link.span_id.hex() for link in span.links),
            )
            for request in list(self.received)
            for part in request.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
            if span.trace_id.hex() == trace_id
        }

    def stop(self) -> None:
        self._server.stop(None)


@dataclass(frozen=True)
class Line:
    """One way from a gateway through an engine to a cache service."""

    gateway: Process
    engine: Process
    kvcache: Process

    def complete(self, prompt: str, *, max_tokens: int = 3, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """A completion over HTTP, with its timing."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        url = f"http://{self.gateway.http}/v1/completions"
        response = httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S)
        response.raise_for_status()
        return response.json()

    def ready(self) -> None:
        """Waits until the gateway has its engine, and the engine its cache service."""
        _until(
            lambda: (
                self.gateway.metric("katydid_gateway_connected_engines")
                and self.engine.metric("katydid_engine_attached_caches")
            )
        )

    def store(self, prompt: str) -> None:
        """Has the prompt's blocks computed and written down, and leaves the engine without them."""
        self.complete(prompt, max_tokens=1)
        blocks = len(prompt) // 64
        with grpc.insecure_channel(self.kvcache.address) as channel:
            stats = KvCacheServiceStub(channel).Stats

            def stored() -> bool:
                return max(tier.blocks for tier in stats(kvcache_pb2.StatsRequest(), timeout=10).tiers) >= blocks

            _until(stored)
            CacheAdminStub(channel).Flush(kvcache_pb2.FlushRequest(), timeout=PATIENCE_S)
        self.empty_engine()

    def empty_engine(self) -> None:
        with grpc.insecure_channel(self.engine.address) as channel:
            AdminServiceStub(channel).Flush(engine_pb2.FlushRequest(), timeout=PATIENCE_S)

    def measure(self, prompt: str, times: int) -> dict[str, float]:
        """Median milliseconds of every phase, over requests whose prompt is in the cache service alone; TPOT as
        `decode`."""
        self.store(prompt)
        return _medians([self._account(prompt) for _ in range(times)])

    def growth(self, usual: Line, prompt: str, times: int) -> dict[str, float]:
        """Median milliseconds by which every phase takes longer here than over `usual`: measured in turn, because a
        machine that is busy with other things now need not be a minute later."""
        usual.store(prompt)
        self.store(prompt)
        pairs = [(usual._account(prompt), self._account(prompt)) for _ in range(times)]
        return _medians([{name: slowed[name] - plain[name] for name in plain} for plain, slowed in pairs])

    def _account(self, prompt: str) -> dict[str, float]:
        """Milliseconds of every phase of one request."""
        self.empty_engine()
        timing = self.complete(prompt)["timing"]
        phases: dict[str, float] = timing["phases_ms"]
        return phases | {"decode": timing["tpot_ms"]}


@dataclass(frozen=True)
class Lab:
    """`slow` has a line for each service that is slow in it. What is not slow exports to `collector` too; every process
    writes into `trace_file`."""

    plain: Line
    slow: dict[str, Line]
    trace_file: Path
    collector: Collector

    def spans(self, trace_id: str, count: int) -> list[Span]:
        """The trace's spans, once there are so many: processes write within 0.2 s."""
        found: list[Span] = []

        def complete() -> bool:
            found[:] = [span for span in read_spans([self.trace_file])[0] if span.trace_id == trace_id]
            return len(found) >= count

        _until(complete)
        return choose_trace(found, trace_id)


@contextlib.contextmanager
def running_lab(model: Path, folder: Path) -> Iterator[Lab]:
    """Starts everything at once, and ends every process of it."""
    collector = Collector()
    started: list[Process] = []
    trace_file = folder / "trace.jsonl"

    def start(service: str, slow: bool, *options: str) -> Process:
        listen, http = (f"{HOST}:{port}" for port in free_ports(2))
        if slow:
            delays = (f"{_POINTS.get(phase, phase)}:{delay}" for phase, delay in DELAYS_MS[service].items())
            options += ("--fault-delays", ",".join(delays))
        else:
            options += ("--otlp-endpoint", collector.endpoint)
        options = ("--listen", listen, "--http-listen", http, "--trace-file", str(trace_file), *options)
        process = Process(f"katydid_{service}", folder, *options, http=http)
        process.start(wait=False)
        started.append(process)
        return process

    def kvcache(slow: bool = False) -> Process:
        sizes = ("--disk-bytes", str(64 << 20), "--memory-bytes", str(64 << 20))
        return start("kvcache", slow, "--disk-path", str(folder / f"disk-{slow}"), *sizes)

    def engine(cache: Process, slow: bool = False) -> Process:
        # However slow a fetch is made, it is made: else the engine would compute what is faster computed.
        fetching = ("--kvcache-address", cache.address, "--kvcache-fetch", "always")
        options = ("--threads", "1", "--kv-pages", "64", *fetching)
        return start("engine", slow, "--model", str(model), *options)

    def gateway(of: Process, cache: Process, slow: bool = False) -> Process:
        return start(
            *("gateway", slow, "--model", str(model), "--engines", of.address, "--kvcache-address", cache.address)
        )

    try:
        cache = kvcache()
        served = engine(cache)
        plain = Line(gateway(served, cache), served, cache)
        slow = {}
        for service in DELAYS_MS:
            cache = kvcache(slow=True) if service == "kvcache" else plain.kvcache
            served = plain.engine if service == "gateway" else engine(cache, slow=service == "engine")
            slow[service] = Line(gateway(served, cache, slow=service == "gateway"), served, cache)
        for process in started:
            process.ready()
        for line in (plain, *slow.values()):
            line.ready()
        yield Lab(plain, slow, trace_file, collector)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.stop()
        collector.stop()


def _medians(accounts: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(account[name] for account in accounts) for name in accounts[0]}


def _until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s"
        time.sleep(0.05)
