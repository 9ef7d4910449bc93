"""Reads over bulk lanes end at their deadline, and lanes that failed rest for a moment."""

from __future__ import annotations

import asyncio
import time

from katydid_cache.lane_reads import LEAST_BYTES, LaneReads
from katydid_cache.pulls import LaneOffer


def test_a_service_that_prepares_nothing_costs_the_deadline_and_the_lanes_rest() -> None:
    async def hang(_hashes: bytes) -> LaneOffer:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def scenario() -> None:
        lanes = LaneReads("127.0.0.1", 2)
        assert lanes.usable(LEAST_BYTES)
        into = [memoryview(bytearray(LEAST_BYTES)) for _ in range(4)]
        started = time.monotonic()
        assert await lanes.get(hang, 1, bytes(4 * 32), into, range(4), 0.1) == ([False] * 4, [])
        assert 0.1 <= time.monotonic() - started < 2
        assert not lanes.usable(LEAST_BYTES)

    asyncio.run(asyncio.wait_for(scenario(), 10))
