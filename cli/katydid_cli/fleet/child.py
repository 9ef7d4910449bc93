"""One child process: started in a session of its own, read line by line, asked to stop, then made to.

The terminal's Ctrl-C reaches the parent alone, which stops children in order. A parent that is killed takes its
children with it (PR_SET_PDEATHSIG), and a child that is killed takes its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from katydid_runtime.errors import UnavailableError

from katydid_cli.fleet.plan import ServicePlan

__all__ = ["Child", "ChildExitError"]

_PR_SET_PDEATHSIG = 1
_HEALTH_PERIOD_S = 0.1
_LINE_LIMIT = 1024 * 1024


class ChildExitError(UnavailableError):
    """A child ended on its own. `code` is its exit code, `last_words` its last line on stderr that was no log line."""

    def __init__(self, name: str, code: int, last_words: str) -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"{name} {how}" + (f": {last_words}" if last_words else ""))
        self.code = code
        self.last_words = last_words


class Child:
    """A running service. Lines it writes go to `on_line(name, line)`."""

    def __init__(
        self, plan: ServicePlan, process: asyncio.subprocess.Process, on_line: Callable[[str, str], None]
    ) -> None:
        self.plan = plan
        self._process = process
        self._on_line = on_line
        self._last_words = ""
        self._readers = [
            asyncio.create_task(self._read(stream)) for stream in (process.stdout, process.stderr) if stream is not None
        ]

    @classmethod
    async def start(cls, plan: ServicePlan, on_line: Callable[[str, str], None]) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", plan.module, *plan.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            limit=_LINE_LIMIT,
        )
        return cls(plan, process, on_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_serving(self) -> None:
        """Return when health says SERVING. Raises ChildExitError when the process ends before."""
        async with grpc.aio.insecure_channel(self.plan.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            while True:
                if self._process.returncode is not None:
                    raise await self.exit_error()
                try:
                    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=1)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.RpcError:
                    pass  # not listening yet
                await asyncio.sleep(_HEALTH_PERIOD_S)

    async def wait(self) -> int:
        """The exit code, once it has ended."""
        return await self._process.wait()

    async def exit_error(self) -> ChildExitError:
        """What its end means; reads its last words first."""
        code = await self._process.wait()
        await asyncio.gather(*self._readers)
        return ChildExitError(self.plan.name, code, self._last_words)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, `grace_s` to drain, then SIGKILL to whatever is left of its process group. Always reaps."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), grace_s)
            except TimeoutError:
                self._on_line(self.plan.name, f"did not stop within {grace_s:g} s; killed")
        self.kill()
        await self._process.wait()
        await asyncio.gather(*self._readers)

    def kill(self) -> None:
        """SIGKILL to the process group: nothing of it, workers included, outlives this."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # longer than the limit: its buffer has been dropped
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text and not text.startswith("{"):
                self._last_words = text
            self._on_line(self.plan.name, text)


_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
