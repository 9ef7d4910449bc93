"""Servers that shared stores speak to, as processes of the test: Redis from the system, S3 from moto."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["free_port", "redis_server", "s3_server"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def redis_server(port: int = 0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A Redis or Valkey server on a loopback port: its URL and process. Skips the test where there is none."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("needs redis-server or valkey-server")
    port = port or free_port()
    words = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        _until(lambda: socket.create_connection(("127.0.0.1", port), 1).close())
        yield f"redis://127.0.0.1:{port}/0", process
    finally:
        process.kill()
        process.wait(10)


@contextmanager
def s3_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """moto's S3 server with an empty bucket: the bucket's URL and the process. The environment names the server."""
    pytest.importorskip("moto")
    port = free_port()
    with (folder / "moto.log").open("wb") as log:
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(words, stdout=log, stderr=log)
    endpoint = f"http://127.0.0.1:{port}"
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        _until(lambda: _put(f"{endpoint}/bucket"))
        yield "s3://bucket/cache", process
    finally:
        process.kill()
        process.wait(10)


def _put(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5):
        pass


def _until(works: object) -> None:
    """Try for some seconds until the server answers."""
    deadline = time.monotonic() + 20
    while True:
        try:
            works()  # type: ignore[operator]
            return
        except (OSError, urllib.error.URLError):
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)
