"""Starts a fleet in stages, keeps it running, and takes it down in order.

A child that ends before the fleet was ready ends the fleet: its last words are the reason. A child that dies later is
started again after a second, so that an engine killed under load rejoins; one that dies four times within a minute
ends the fleet.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from katydid_runtime.errors import UnavailableError

from katydid_cli.fleet.child import Child, ChildExitError
from katydid_cli.fleet.plan import ServicePlan

__all__ = ["Display", "Supervisor"]

_RESTART_AFTER_S = 1.0
_RESTART_LIMIT = 3
_RESTART_WINDOW_S = 60.0
_KILL_AFTER_DRAIN_S = 5.0


class Display(Protocol):
    """Where progress and log lines go. States: starting, ready, restarting, stopping, stopped."""

    def state(self, name: str, state: str) -> None: ...

    def line(self, name: str, line: str) -> None: ...


class Supervisor:
    """Runs `plans`. `start` returns when all are SERVING, `run` when a child is lost for good."""

    def __init__(
        self,
        plans: Sequence[ServicePlan],
        display: Display,
        *,
        drain_timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self._plans = plans
        self._display = display
        self._drain_timeout_s = drain_timeout_s
        self._start_timeout_s = start_timeout_s
        self._children: dict[str, Child] = {}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children by name."""
        return {name: child.pid for name, child in self._children.items()}

    async def start(self) -> None:
        """Start stage after stage. Raises ChildExitError, or UnavailableError when a child is not ready in time."""
        for stage in sorted({plan.stage for plan in self._plans}):
            starting = [plan for plan in self._plans if plan.stage == stage]
            await _all_or_first_error([self._start(plan) for plan in starting])

    async def run(self) -> None:
        """Watch over the fleet until cancelled. Raises ChildExitError when a child cannot be kept alive."""
        await _all_or_first_error([self._keep(plan) for plan in self._plans])

    async def stop(self) -> None:
        """Gateway first, so that no new work arrives, then engines, then the cache; each is drained and reaped."""
        for stage in sorted({plan.stage for plan in self._plans}, reverse=True):
            names = [plan.name for plan in self._plans if plan.stage == stage]
            gateways = [name for name in names if name == "gateway"]
            for group in (gateways, [name for name in names if name not in gateways]):
                await asyncio.gather(*(self._stop(name) for name in group if name in self._children))

    def kill(self) -> None:
        """Kill everything at once; `stop` then only reaps."""
        for child in self._children.values():
            child.kill()

    async def _start(self, plan: ServicePlan) -> None:
        self._display.state(plan.name, "starting")
        child = await Child.start(plan, self._display.line)
        self._children[plan.name] = child
        try:
            await asyncio.wait_for(child.wait_serving(), self._start_timeout_s)
        except TimeoutError:
            raise UnavailableError(f"{plan.name} was not ready within {self._start_timeout_s:g} s") from None
        self._display.state(plan.name, "ready")

    async def _keep(self, plan: ServicePlan) -> None:
        deaths: deque[float] = deque()
        while True:
            child = self._children[plan.name]
            await child.wait()
            error = await child.exit_error()
            child.kill()
            now = time.monotonic()
            deaths.append(now)
            while now - deaths[0] > _RESTART_WINDOW_S:
                deaths.popleft()
            if len(deaths) > _RESTART_LIMIT:
                raise error
            self._display.line(plan.name, str(error))
            self._display.state(plan.name, "restarting")
            await asyncio.sleep(_RESTART_AFTER_S)
            try:
                await self._start(plan)
            except ChildExitError:
                continue  # counted as another death

    async def _stop(self, name: str) -> None:
        self._display.state(name, "stopping")
        await self._children[name].stop(self._drain_timeout_s + _KILL_AFTER_DRAIN_S)
        self._display.state(name, "stopped")


async def _all_or_first_error(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error cancels the rest and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            for item in work:
                group.create_task(item)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
