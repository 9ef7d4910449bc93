"""Writers killed at random points over a shared store: another instance reads what is there, and nothing is wrong."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from katydid_cache import CacheClient, PutBlock
from katydid_runtime.errors import KatydidError

from tests.kvcache.running import IDENTITY, LAYOUT, MIB, ServiceProcess
from tests.kvcache.stores import redis_server

pytestmark = [pytest.mark.soak, pytest.mark.e2e]

KILLS = 60


def block(number: int) -> PutBlock:
    return PutBlock(number.to_bytes(32, "big"), b"", random.Random(number).randbytes(LAYOUT.block_bytes))


def instance(folder: Path, url: str) -> ServiceProcess:
    policy = folder / "policy.yaml"
    policy.write_text("tiers: {shared: {admission: all}}")
    options = {"shared_url": url, "shared_pack_bytes": MIB, "shared_refresh_s": 0.05, "policy_file": policy}
    return ServiceProcess(**options)


async def write(address: str, numbers: list[int]) -> None:
    async with CacheClient(address) as cache:
        await cache.attach(IDENTITY, LAYOUT)
        for start in range(0, len(numbers), 8):
            await cache.put([block(number) for number in numbers[start : start + 8]])


@pytest.mark.parametrize("kind", ["file", "redis"])
def test_writers_killed_at_any_point_leave_nothing_wrong(kind: str, tmp_path: Path) -> None:
    dice = random.Random(11)

    async def scenario() -> None:
        with ExitStack() as stack:
            url = stack.enter_context(redis_server())[0] if kind == "redis" else f"file://{tmp_path}/store"
            for run in range(KILLS):
                numbers = [*range(400 * run, 400 * (run + 1))]
                with instance(tmp_path, url) as writer:
                    writing = asyncio.create_task(write(writer.address, numbers))
                    await asyncio.sleep(dice.uniform(0.02, 0.4))
                    writer.kill()
                    await asyncio.gather(writing, return_exceptions=True)
            found = 0
            reader = stack.enter_context(instance(tmp_path, url))
            async with CacheClient(reader.address) as cache:
                await cache.attach(IDENTITY, LAYOUT)
                deadline = time.monotonic() + 60
                while not (await cache.stats()).tiers[3].blocks:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.1)
                await asyncio.sleep(1.0)
                into = memoryview(bytearray(LAYOUT.block_bytes))
                for number in range(400 * KILLS):
                    name = number.to_bytes(32, "big")
                    try:
                        if not (await cache.lookup(name, lease=False)).blocks:
                            continue
                        got = await cache.get(0, name, into=[into])
                    except KatydidError as error:
                        raise AssertionError(f"block {number}") from error
                    assert got.prefix == 1, got
                    assert into == random.Random(number).randbytes(LAYOUT.block_bytes), f"block {number} is wrong"
                    found += 1
            assert found > 100, "hardly anything reached the store"

    asyncio.run(asyncio.wait_for(scenario(), 600))
