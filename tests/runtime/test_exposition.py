"""The three HTTP pages of a gRPC service, and clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import httpx
import pytest
from katydid_runtime import exposition
from katydid_runtime.errors import AddressInUseError, SettingsError
from katydid_runtime.exposition import Exposition, split_address
from katydid_runtime.metrics import Metrics


def run(scenario, *, ready: bool = True, alive: bool = True) -> None:
    async def body() -> None:
        metrics = Metrics("sample")
        metrics.gauge("load_ratio", "Load.").set(0.5)
        server = Exposition(metrics, lambda: ready)
        server.alive = lambda: alive
        address = await server.start("127.0.0.1:0")
        try:
            await scenario(address)
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(body(), 20))


def test_pages():
    async def scenario(address):
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            metrics = await client.get("/metrics?name=x")
            assert (metrics.status_code, "katydid_sample_load_ratio 0.5" in metrics.text) == (200, True)
            assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
            statuses = [(await client.get(path)).status_code for path in ("/healthz", "/readyz", "/", "/metrics/")]
            assert statuses == [200, 200, 404, 404]
            assert (await client.post("/healthz")).status_code == 405
            head = await client.head("/healthz")
            assert (head.status_code, head.headers["content-length"], head.content) == (200, "3", b"")

    run(scenario)


def test_not_ready():
    async def scenario(address):
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/healthz")).status_code == 200

    run(scenario, ready=False)


def test_not_alive():
    async def scenario(address):
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            assert (await client.get("/healthz")).status_code == 503
            assert (await client.get("/metrics")).status_code == 200

    run(scenario, alive=False)


@pytest.mark.parametrize("sent", [b"", b"GET /metrics", b"x" * 20_000, b"\r\n\r\n", b"\x16\x03\x01\r\n\r\n"])
def test_clients_that_send_no_request_are_dropped(sent, monkeypatch):
    monkeypatch.setattr(exposition, "_TIMEOUT_S", 0.1)

    async def scenario(address):
        host, port = split_address(address)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(sent)
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(), 5)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
        writer.close()
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            assert (await client.get("/healthz")).status_code == 200

    run(scenario)


def test_an_address_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressInUseError, match=address):
            asyncio.run(Exposition(Metrics("sample"), lambda: True).start(address))


def test_split_address():
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address(":80") == ("0.0.0.0", 80)
    for bad in ("", "host", "host:", "host:-1", "host:65536", "host:８０"):
        with pytest.raises(SettingsError):
            split_address(bad)
