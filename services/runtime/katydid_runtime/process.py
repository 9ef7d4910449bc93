"""From a command line to a running service: what every `__main__` does the same way.

    def main() -> None:
        run_service("engine", EngineSettings, serve)

A configuration that cannot work ends the process with exit code 2 and one line on stderr; anything else that escapes
`serve` is a defect and ends it with a traceback and exit code 1. Until `serve` handles SIGTERM and SIGINT itself
(`RpcServer.run_until_signal`), they cancel it, so that a process told to stop while it loads still cleans up.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

from katydid_runtime import log
from katydid_runtime.errors import SettingsError
from katydid_runtime.settings import ServiceSettings
from katydid_runtime.telemetry import Telemetry

__all__ = ["exit_misconfigured", "run_service"]

S = TypeVar("S", bound=ServiceSettings)

logger = logging.getLogger(__name__)


def run_service(
    service: str,
    settings_class: type[S],
    serve: Callable[[S, Telemetry], Awaitable[None]],
) -> None:
    """Load the settings, set up logs and tracing, and run `serve(settings, telemetry)` on uvloop until it returns."""
    try:
        settings = settings_class.load(sys.argv[1:])
        log.configure(service, settings.log_level)
        telemetry = Telemetry(
            service,
            trace_file=settings.trace_file,
            otlp_endpoint=settings.otlp_endpoint,
            sample_ratio=settings.trace_sample_ratio,
        )
    except SettingsError as error:
        exit_misconfigured(service, error)
    logger.info("settings", extra={"settings": settings.describe()})

    async def body() -> int:
        stopped_by: list[signal.Signals] = []
        serving = asyncio.ensure_future(serve(settings, telemetry))

        def stop(number: signal.Signals) -> None:
            stopped_by.append(number)
            serving.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        try:
            await serving
        except asyncio.CancelledError:
            if not stopped_by:
                raise
            return 128 + stopped_by[0]
        return 0

    import uvloop

    try:
        code = uvloop.run(body())
    except SettingsError as error:
        exit_misconfigured(service, error)
    finally:
        telemetry.shutdown()
    if code:
        raise SystemExit(code)


def exit_misconfigured(program: str, error: SettingsError) -> NoReturn:
    """Print the error as one line on stderr and exit with code 2."""
    line = " ".join(str(error).split())
    print(f"{program}: {line}", file=sys.stderr)
    raise SystemExit(2)
