"""What ends an engine's ailment before the next question."""

from __future__ import annotations

import asyncio
import time

import grpc
from katydid_gateway.engines.health import STUCK, HealthWatch
from katydid_gateway.engines.progress import LEAST_S, WEDGED


def test_a_frame_ends_what_only_its_absence_said() -> None:
    """A wedged engine that goes on is well before the next check; one that says it is stuck is not."""

    async def body() -> None:
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            watch = HealthWatch(channel, lambda: None)
            watch.progress.sent(1, 0.0, time.monotonic() - LEAST_S - 1)
            watch.ailment = WEDGED
            watch.heard(draining=False)
            assert watch.ailment == WEDGED  # a frame without a token
            watch.progress.moved(time.monotonic())
            watch.heard(draining=False)
            assert watch.ailment == ""
            watch.ailment = STUCK
            watch.heard(draining=False)
            assert watch.ailment == STUCK

    asyncio.run(body())
