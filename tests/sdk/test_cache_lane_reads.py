"""Reads over bulk lanes end at their deadline, and lanes that failed rest for a moment."""

from __future__ import annotations

import asyncio
import contextlib
import time

from katydid_cache.lane import TOKEN_BYTES
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


def test_a_lane_that_drips_ends_at_the_deadline_too() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(TOKEN_BYTES)
        try:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(bytes(1024))
                    await writer.drain()
                    await asyncio.sleep(0.05)
        finally:
            writer.close()

    async def offer(_hashes: bytes) -> LaneOffer:
        return LaneOffer(bytes(TOKEN_BYTES), (bytes(16),), {})

    async def scenario() -> None:
        server = await asyncio.start_server(drip, "127.0.0.1")
        lanes = LaneReads("127.0.0.1", 1)
        into = [memoryview(bytearray(LEAST_BYTES))]
        started = time.monotonic()
        port = server.sockets[0].getsockname()[1]
        assert await lanes.get(offer, port, bytes(32), into, [0], 0.2) == ([False], [])
        assert 0.2 <= time.monotonic() - started < 5, "it does not fall silent, and would take minutes"
        server.close()
        lanes.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))
