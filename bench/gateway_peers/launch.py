"""Starts other gateways before mock engines, each in a virtual environment of its own.

`folder` has one for each peer that is to be measured: smg/ (`pip install smg`), vllm-router/ (`pip install
vllm-router`), production-stack/ (a checkout of vllm-project/production-stack) with ps/ (its dependencies). What is
missing is skipped.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bench.http_load import Wire, encoded
from tests.gateway.processes import ROOT, Process

__all__ = ["PEERS", "Peer", "free_port", "start_peer"]

START_TIMEOUT_S = 60.0


class Peer:
    """A started peer: its port, its processes, and how to stop them."""

    def __init__(self, port: int, engines: list[Process], process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self._engines = engines
        self._process = process

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        for engine in self._engines:
            engine.stop()


def _smg(folder: Path, port: int, urls: list[str]) -> list[str]:
    options = ["--policy", "cache_aware", "--log-level", "error", "--prometheus-port", str(free_port())]
    options += ["--disable-worker-overload-protection", "--disable-load-monitoring"]
    return [
        str(folder / "smg/bin/smg"),
        "launch",
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        *options,
        "--worker-urls",
        *urls,
    ]


def _vllm_router(folder: Path, port: int, urls: list[str]) -> list[str]:
    options = ["--policy", "cache_aware", "--log-level", "error", "--prometheus-port", str(free_port())]
    where = ["--port", str(port), "--host", "127.0.0.1"]
    return [str(folder / "vllm-router/bin/vllm-router"), *where, *options, "--worker-urls", *urls]


def _production_stack(folder: Path, port: int, urls: list[str]) -> list[str]:
    backends = ["--static-backends", ",".join(urls), "--static-models", ",".join("mock" for _ in urls)]
    options = ["--service-discovery", "static", *backends, "--routing-logic", "prefixaware", "--log-level", "error"]
    python = str(folder / "ps/bin/python")
    return [python, "-m", "vllm_router.app", "--port", str(port), "--host", "127.0.0.1", *options]


_COMMANDS = {
    "SMG": ("smg/bin/smg", _smg),
    "vllm-router": ("vllm-router/bin/vllm-router", _vllm_router),
    "production-stack": ("production-stack/src/vllm_router/app.py", _production_stack),
}
PEERS = tuple(_COMMANDS)


def start_peer(name: str, folder: Path, engines: int, mock: Mapping[str, object]) -> Peer | None:
    """A peer before so many mock engines, answering; None when `folder` does not have it."""
    needed, command = _COMMANDS[name]
    if not (folder / needed).exists():
        return None
    options = [part for key, value in mock.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    mocks = [Process("bench/gateway_peers/openai_mock.py", *options) for _ in range(engines)]
    urls = [f"http://{mock.expect('READY').split()[1]}" for mock in mocks]
    port = free_port()
    # Two peers have a package of one name.
    path = str(folder / "production-stack/src") if name == "production-stack" else ""
    environment = {**os.environ, "PYTHONPATH": path}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command(folder, port, urls), stdout=quiet, stderr=quiet, env=environment, cwd=ROOT)
    peer = Peer(port, mocks, process)
    try:
        asyncio.run(asyncio.wait_for(_answering(port), START_TIMEOUT_S))
    except BaseException:
        peer.stop()
        raise
    return peer


async def _answering(port: int) -> None:
    while True:
        try:
            wire = Wire("127.0.0.1", port)
            await wire.send(encoded([{"role": "user", "content": "hi"}], max_tokens=1))
            wire.close()
        except (RuntimeError, OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.2)
        else:
            return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
