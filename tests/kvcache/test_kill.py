"""kill -9 in the middle of durable writes: what was answered as stored is there and right, nothing is ever wrong."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from pathlib import Path

import pytest
from katydid_cache import CacheClient, Durability, PutBlock, PutStatus

from tests.kvcache.running import IDENTITY, LAYOUT, MIB, ServiceProcess

pytestmark = pytest.mark.e2e

BATCH = 12


def payload(name: int) -> bytes:
    return random.Random(name).randbytes(LAYOUT.block_bytes)


def key(name: int) -> bytes:
    return name.to_bytes(32, "big")


async def check(cache: CacheClient, names: list[int], stored: set[int]) -> None:
    """Read `names` back: those in `stored` must be there, and whatever is there must be right."""
    for start in range(0, len(names), 256):
        part = names[start : start + 256]
        buffers = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in part]
        result = await cache.get(0, b"".join(map(key, part)), into=buffers)
        for name, found, buffer in zip(part, result.found, buffers, strict=True):
            assert not found or buffer == payload(name), f"block {name} came back wrong"
        lost = {name for name, found in zip(part, result.found, strict=True) if not found} & stored
        assert not lost, f"stored blocks are gone: {sorted(lost)[:5]}"


async def write(cache: CacheClient, first: int) -> set[int]:
    """Write a batch durably and say which blocks were answered as stored."""
    names = range(first, first + BATCH)
    blocks = [PutBlock(key(name), b"", payload(name)) for name in names]
    outcomes = await cache.put(blocks, durability=Durability.DISK, timeout_s=20)
    return {name for name, outcome in zip(names, outcomes, strict=True) if outcome.status is PutStatus.STORED}


async def write_until_killed(service: ServiceProcess, cache: CacheClient, first: int, delay_s: float) -> set[int]:
    """Write a batch, kill the service meanwhile, and say which blocks were answered as stored."""
    writing = asyncio.create_task(write(cache, first))
    await asyncio.sleep(delay_s)
    service.kill()
    return await writing


def kill_repeatedly(folder: Path, kills: int, seed: int) -> tuple[int, int]:
    """How many blocks were stored, half of them undisturbed, and how many writes were cut off, over all kills."""
    dice = random.Random(seed)
    stored: set[int] = set()
    offered = 0

    async def scenario() -> None:
        nonlocal offered
        for number in range(kills + 1):
            if dice.random() < 0.25:
                shutil.rmtree(folder / "index", ignore_errors=True)
            options = {"disk_bytes": 64 * MIB + kills * BATCH * 4 * LAYOUT.block_bytes}
            with ServiceProcess(folder, **options) as service:
                async with CacheClient(service.address, degrade=True) as cache:
                    assert await cache.attach(IDENTITY, LAYOUT)
                    recent = list(range(offered))[-40 * BATCH :]
                    await check(cache, recent if number < kills else list(range(offered)), stored)
                    started = time.monotonic()
                    stored.update(await write(cache, offered))
                    took_s = time.monotonic() - started
                    # Some kills come before the batch's first byte, some after its end.
                    delay_s = dice.uniform(0.0, 1.25 * took_s)
                    stored.update(await write_until_killed(service, cache, offered + BATCH, delay_s))
                    offered += 2 * BATCH

    asyncio.run(scenario())
    return len(stored), offered - len(stored)


def test_stored_blocks_survive_kill_9(tmp_path: Path) -> None:
    kills = 8
    stored, cut_off = kill_repeatedly(tmp_path, kills=kills, seed=7)
    # Otherwise the kills came too late or too early to prove anything.
    assert stored > (kills + 1) * BATCH
    assert cut_off > BATCH


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_stored_blocks_survive_kill_9_many_times(tmp_path: Path, seed: int) -> None:
    kill_repeatedly(tmp_path, kills=80, seed=100 + seed)
