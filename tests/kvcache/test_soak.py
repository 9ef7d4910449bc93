"""Long runs: a thousand injected faults, a million random operations, many clients at once."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from katydid_cache import BlockMissReason, CacheClient, Durability, PutBlock, Tier

from tests.kvcache.inside import durably, flip, get, key, opened, payload
from tests.kvcache.running import IDENTITY, LAYOUT, MIB, ServiceProcess
from tests.kvcache.test_store import Books

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


class TestManyOperations(Books.TestCase):  # type: ignore[name-defined,misc]
    """About a million operations of the store against its model."""

    settings = settings(
        max_examples=5000,
        stateful_step_count=200,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def test_a_thousand_flipped_and_torn_pieces_serve_nothing_wrong(tmp_path: Path) -> None:
    """Each round damages memory, segments and index in many places, and restarts half of the time."""
    dice = random.Random(11)
    injected = wrong = 0

    async def scenario() -> None:
        nonlocal injected, wrong
        names = range(100)
        while injected < 1200:
            async with opened(tmp_path) as (cache, space):
                for name in names:
                    if key(name) not in space.blocks:
                        await durably(cache, space, name)
                for name in dice.sample(names, 20):
                    block = space.blocks.get(key(name))
                    if block is None or not block.complete:
                        continue
                    if block.memory is not None and dice.random() < 0.5:
                        cache.memory.view(block)[dice.randrange(LAYOUT.block_bytes)] ^= 1 << dice.randrange(8)
                        injected += 1
                    elif block.disk is not None:
                        if block.memory is not None:
                            cache.store.leave(cache.store.memory, block)
                        flip(tmp_path, block.disk.slab, block.disk.index, dice.randrange(296 + LAYOUT.block_bytes))
                        injected += 1
                for name in names:
                    answer = await get(cache, space, name)
                    wrong += answer not in (payload(name), BlockMissReason.ABSENT, BlockMissReason.CORRUPT)
            data = tmp_path / "index" / "data.mdb"
            content = bytearray(data.read_bytes())
            for _ in range(dice.choice([0, 0, 1, 20])):
                content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
                injected += 1
            data.write_bytes(content[: dice.choice([len(content), len(content), dice.randrange(len(content))])])
            if dice.random() < 0.2:
                # What quarantine and lost rows have used up would end the run early.
                shutil.rmtree(tmp_path / "index")

    asyncio.run(scenario())
    assert injected >= 1000
    assert wrong == 0


def test_32_clients_hammer_one_service(tmp_path: Path) -> None:
    """Everything read is checked; at the end no lease, no reservation, no descriptor and no memory is left over."""

    async def client(address: str, number: int, rounds: int) -> int:
        dice = random.Random(number)
        served = 0
        async with CacheClient(address, name=f"client {number}", degrade=True) as cache:
            await cache.attach(IDENTITY, LAYOUT)
            for _ in range(rounds):
                first = dice.randrange(400)
                names = range(first, first + 12)
                if dice.random() < 0.4:
                    blocks = [PutBlock(key(name), b"", payload(name)) for name in names]
                    await cache.put(blocks, durability=dice.choice(list(Durability)))
                    continue
                found = await cache.lookup(b"".join(map(key, names)))
                into = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(found.blocks)]
                result = await cache.get(found.lease, b"".join(map(key, names[: found.blocks])), into=into)
                for name, there, buffer in zip(names, result.found, into, strict=False):
                    assert not there or buffer == payload(name)
                    served += there
                if dice.random() < 0.9:
                    await cache.release(found.lease)
        return served

    async def scenario() -> None:
        with ServiceProcess(tmp_path, memory_bytes=4 * MIB, disk_bytes=8 * MIB) as service:
            proc = Path(f"/proc/{service.process.pid}")
            figures = []
            for _ in range(4):
                served = await asyncio.gather(*(client(service.address, number, 40) for number in range(32)))
                assert sum(served) > 1000
                async with CacheClient(service.address) as cache:
                    while (stats := await cache.stats()).leases or stats.attachments:
                        await asyncio.sleep(0.05)
                    assert stats.tiers[Tier.MEMORY].corrupt == stats.tiers[Tier.DISK].corrupt == 0
                pages = int((proc / "statm").read_text().split()[1])
                figures.append((pages * resource.getpagesize(), len(os.listdir(proc / "fd"))))
            assert figures[-1][0] < figures[0][0] + 64 * MIB
            assert figures[-1][1] <= figures[0][1] + 2

    asyncio.run(scenario())
