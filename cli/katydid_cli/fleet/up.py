"""The command itself: resolve the model, start the fleet, say where it listens, wait for Ctrl-C, take it down."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import httpx
from katydid_runtime.errors import KatydidError, SettingsError, UnavailableError
from rich.console import Console

from katydid_cli.fleet.child import ChildExitError
from katydid_cli.fleet.display import TerminalDisplay
from katydid_cli.fleet.plan import HOST, LAST_PORT, FleetOptions, check_free, free_ports, plan_fleet
from katydid_cli.fleet.supervisor import Supervisor
from katydid_cli.more_than_zero import check_more_than_0
from katydid_cli.writable import check_writable_file, check_writable_folder

__all__ = ["check_options", "connected_engines", "up"]

_CONNECT_TIMEOUT_S = 30.0


def check_options(options: FleetOptions) -> None:
    """Raises SettingsError for what cannot work, before anything is started."""
    if options.engines < 1:
        raise SettingsError(f"--engines={options.engines}: at least 1", field="engines", value=options.engines)
    if options.port == options.grpc_port:
        raise SettingsError(f"--port and --grpc-port are both {options.port}", field="grpc_port", value=options.port)
    first = options.metrics_port
    metrics_ports = range(0) if first is None else range(first, first + options.engines + 1)
    if metrics_ports and metrics_ports[-1] > LAST_PORT:
        raise SettingsError(
            f"--metrics-port={first}: the last engine's would be {metrics_ports[-1]}, allowed is {LAST_PORT}",
            field="metrics_port",
            value=first,
        )
    check_free("--port", options.port)
    check_free("--grpc-port", options.grpc_port)
    for port in metrics_ports:
        check_free("--metrics-port", port)
    if options.kv_disk_dir is not None:
        check_writable_folder("--kv-disk-dir", options.kv_disk_dir)
    if options.trace_file is not None:
        check_writable_file("--trace-file", options.trace_file)


class _Pipe(Console):
    """Stops the fleet, as Ctrl-C does, when nobody reads what it prints any more (`katydid up | head`)."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        signal.raise_signal(signal.SIGINT)


def up(options: FleetOptions, *, log_level: str = "warning", start_timeout_s: float = 600.0) -> int:
    """Run the fleet until SIGINT or SIGTERM; returns the exit code.

    0 after a clean stop, 2 when a child refused its settings, 1 when one was lost. A second signal kills.
    """
    check_more_than_0("--start-timeout-s", start_timeout_s)
    check_options(options)
    return asyncio.run(_up(options, log_level, start_timeout_s))


async def _up(options: FleetOptions, log_level: str, start_timeout_s: float) -> int:
    console = _Pipe(highlight=False)
    display = TerminalDisplay(console, log_level)
    plans = plan_fleet(options, free_ports(options.engines + 1))
    supervisor = Supervisor(plans, display, drain_timeout_s=options.drain_timeout_s, start_timeout_s=start_timeout_s)
    kvcache = next(plan.address for plan in plans if plan.name == "kvcache")
    life = asyncio.create_task(_live(supervisor, display, console, options, kvcache))
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if not life.cancelling():
            life.cancel()
        else:
            supervisor.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    code = 0
    try:
        await life
    except asyncio.CancelledError:
        display.settle()
        console.print(f"Stopping: running requests get {options.drain_timeout_s:g} s to end. Ctrl-C again kills.")
    except KatydidError as error:
        code = 2 if isinstance(error, ChildExitError) and error.code == 2 else 1
        display.settle()
        Console(stderr=True, highlight=False).print(f"katydid: {error}", style="bold red", soft_wrap=True, markup=False)
    finally:
        display.settle()
        await supervisor.stop()
    return code


async def _live(
    supervisor: Supervisor, display: TerminalDisplay, console: Console, options: FleetOptions, kvcache: str
) -> None:
    await supervisor.start()
    await _engines_connected(options)
    display.settle()
    engines = f"{options.engines} engine{'s' if options.engines > 1 else ''}"
    console.print(f"[bold green]{options.model_name}[/] is up on {engines}. Ctrl-C stops it.")
    console.print(f"  OpenAI API   http://{HOST}:{options.port}/v1")
    console.print(f"  gRPC         {HOST}:{options.grpc_port}")
    if "--no-console" not in options.gateway_arguments:
        console.print(f"  console      http://{HOST}:{options.port}/console/")
    console.print(f"  KV cache     {kvcache}", soft_wrap=True)
    if options.metrics_port is not None:
        first, last = options.metrics_port, options.metrics_port + options.engines
        console.print(f"  metrics      http://{HOST}:{options.port}/metrics, and ports {first} to {last}")
    if options.trace_file is not None:
        console.print(f"  traces       {options.trace_file}")
    console.print(f"  try          katydid chat --address {HOST}:{options.grpc_port}")
    console.print(f"               katydid cache stats --address {kvcache}", soft_wrap=True)
    await supervisor.run()


async def _engines_connected(options: FleetOptions) -> None:
    """Return when the gateway serves with all engines: it may have met some while they were still loading.

    Asked of its metrics, which need no API key unless the gateway was told so: then one engine is all that can be seen.
    """
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{options.port}", timeout=_CONNECT_TIMEOUT_S) as client:
        while True:
            try:
                metrics = await client.get("/metrics")
                if metrics.is_client_error and (await client.get("/readyz")).is_success:
                    return
                connected = connected_engines(metrics.text)
            except httpx.HTTPError as error:
                raise UnavailableError(f"the gateway does not answer on port {options.port}: {error}") from error
            if connected >= options.engines:
                return
            if time.monotonic() > deadline:
                raise UnavailableError(f"the gateway reached {connected} of {options.engines} engines")
            await asyncio.sleep(0.1)


def connected_engines(metrics: str) -> int:
    """How many engines a gateway's /metrics text says it is connected to."""
    gauges = (line for line in metrics.splitlines() if line.startswith("katydid_gateway_connected_engines{"))
    return sum(float(line.rpartition(" ")[2]) > 0 for line in gauges)
