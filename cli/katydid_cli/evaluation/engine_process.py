"""An engine process started for one evaluation: waited for, asked to stop, killed if it does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from katydid_runtime.errors import SettingsError, UnavailableError

from katydid_cli.fleet.plan import HOST, free_ports

__all__ = ["running_engine"]

_POLL_S = 0.1
_STOP_S = 10.0


@contextmanager
def running_engine(model: Path, options: Sequence[str], *, start_timeout_s: float = 600.0) -> Iterator[str]:
    """Runs `python -m katydid_engine` over `model` with `options`; gives its address once it serves.

    Raises SettingsError when the engine refuses its options or the model, UnavailableError when it ends otherwise or is
    not ready in time; both carry its last words.
    """
    address = f"{HOST}:{free_ports(1)[0]}"
    words = ["-m", "katydid_engine", "--listen", address, "--model", str(model), *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_serving(process, address, log, start_timeout_s)
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_serving(process: subprocess.Popen[bytes], address: str, log: IO[str], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    with grpc.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < end:
            code = process.poll()
            if code is not None:
                error = SettingsError if code == 2 else UnavailableError
                raise error(f"the engine ended with exit code {code}: {_last_words(log)}")
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass  # not listening yet
            time.sleep(_POLL_S)
    raise UnavailableError(f"the engine was not ready within {timeout_s:g} s: {_last_words(log)}")


def _last_words(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
