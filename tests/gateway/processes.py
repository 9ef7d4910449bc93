"""Real processes for tests: a gateway and mock engines, started, awaited by their READY line, and stopped."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 30.0


class Process:
    """A child whose lines are read by a thread; `lines` keeps them all."""

    def __init__(self, *command: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "ERROR"}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def expect(self, text: str) -> str:
        """The first line with `text` in it."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            line = self._queue.get(timeout=max(0.1, deadline - time.monotonic()))
            assert line is not None, f"the process ended:\n{''.join(self.lines)}"
            if text in line:
                return line

    def kill(self) -> None:
        """SIGKILL: no good-byes."""
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self._reader.join(5)
            if self.process.stdout is not None:
                self.process.stdout.close()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(None)


def mock_engine(folder: Path, *options: str) -> tuple[Process, str]:
    """An engine process and its address."""
    process = Process("-m", "tests.gateway.mock_engine", "--model", str(folder), *options)
    return process, process.expect("READY").split()[1]


@contextmanager
def gateway(folder: Path, engines: list[str], *options: str) -> Iterator[tuple[Process, str, str]]:
    """A gateway process with its HTTP and gRPC addresses, connected to every engine."""
    process = Process(
        *("-m", "katydid_gateway", "--model", str(folder), "--engines", ",".join(engines)),
        *("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", *options),
    )
    with ExitStack() as stack:
        stack.callback(process.stop)
        http = json.loads(process.expect('"http_address"'))["http_address"]
        rpc = json.loads(process.expect("READY"))["address"]
        for _ in engines:
            process.expect("engine connected")
        yield process, http, rpc
