"""Starts a gateway: `python -m katydid_gateway --model FOLDER --engines ADDRESS,...`."""

from __future__ import annotations

import gc
import sys

from katydid_runtime.process import run_service
from katydid_runtime.telemetry import Telemetry

from katydid_gateway.gateway import Gateway
from katydid_gateway.settings import GatewaySettings
from katydid_gateway.supervisor import Supervisor

__all__ = ["main"]


async def serve(settings: GatewaySettings, telemetry: Telemetry) -> None:
    """Run one gateway until it is told to stop, or the parent of several processes."""
    if settings.processes > 1 and settings.process_pipe is None:
        code = await Supervisor(settings, sys.argv[1:]).run()
        if code:
            raise SystemExit(code)
        return
    gateway = await Gateway.load(settings, telemetry)
    # What was loaded stays: the collector need not look at it again, and less often at what requests leave behind.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    await gateway.run()


def main() -> None:
    run_service("gateway", GatewaySettings, serve)


if __name__ == "__main__":
    main()
