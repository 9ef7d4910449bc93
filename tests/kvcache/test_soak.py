"""Long runs: a thousand injected faults, a million random operations, many clients at once, a day of churn."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from katydid_cache import BlockLayout, BlockMissReason, CacheClient, Durability, PutBlock, Tier
from xxhash import xxh3_128_digest

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
    """Everything read is checked, every second client goes through the shared memory; at the end no lease, no
    reservation, no descriptor and no memory is left over."""

    async def client(address: str, number: int, rounds: int) -> int:
        dice = random.Random(number)
        served = 0
        async with CacheClient(address, name=f"client {number}", degrade=True) as cache:
            await cache.attach(IDENTITY, LAYOUT, arena=number % 2 == 1)
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
        listen = f"unix:{tmp_path}/cache.sock"
        with ServiceProcess(tmp_path, listen=listen, memory_bytes=4 * MIB, disk_bytes=8 * MIB) as service:
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


def test_a_day_of_churn_leaves_nothing_behind(tmp_path: Path) -> None:
    """10^7 page operations at 4 KiB (a page reserved, committed, looked up, read or let go is one) through a service.

    Two block sizes share memory and disk, chains overlap, leases are held and dropped; after a warm-up neither memory
    nor descriptors nor files grow.
    """
    pages = 10_000_000
    sizes = [BlockLayout(layers=1, kv_heads=1, head_dim=dim, dtype="float8_e4m3fn") for dim in (32, 64)]
    batch = 512

    async def churn(cache: CacheClient, layout: BlockLayout, seed: int, operations: int) -> None:
        dice = random.Random(seed)
        content = bytes([layout.head_dim]) * layout.block_bytes
        checksum = xxh3_128_digest(content)
        done = 0
        while done < operations:
            names = range(first := dice.randrange(60_000), first + batch)
            hashes = b"".join(map(key, names))
            reservation = await cache.in_place.reserve(hashes, parents=bytes(32) + hashes[:-32], timeout_s=60)
            for slot in reservation.slots:
                if slot is not None:
                    cache.in_place.view(slot)[:] = content
            taken = sum(slot is not None for slot in reservation.slots)
            done += batch + len(await cache.in_place.commit(reservation, [checksum] * taken))
            found = await cache.lookup(hashes, timeout_s=60)
            done += batch
            for slot in found.slots[:: batch // 8]:
                assert cache.in_place.view(slot) == content
            if dice.random() < 0.05:
                into = [memoryview(bytearray(layout.block_bytes)) for _ in range(8)]
                result = await cache.get(0, hashes[: 8 * 32], into=into)
                assert all(buffer == content for buffer, there in zip(into, result.found, strict=True) if there)
            if dice.random() < 0.9:
                await cache.release(found.lease, timeout_s=60)
                done += found.blocks

    def held(service: ServiceProcess) -> tuple[int, int, int]:
        proc = Path(f"/proc/{service.process.pid}")
        resident = int((proc / "statm").read_text().split()[1]) * resource.getpagesize()
        return resident, len(os.listdir(proc / "fd")), len(list(tmp_path.rglob("*")))

    async def scenario() -> None:
        listen = f"unix:{tmp_path}/cache.sock"
        options = {"memory_bytes": 64 * MIB, "disk_bytes": 96 * MIB, "lease_ttl_s": 5}
        with ServiceProcess(tmp_path, listen=listen, scrub_bytes_per_s=4 * MIB, **options) as service:
            figures = []
            for turn in range(10):
                # New clients every turn: connections come and go as well.
                async with CacheClient(listen) as one, CacheClient(listen) as two:
                    for cache, layout in zip((one, two), sizes, strict=True):
                        await cache.attach(bytes([layout.head_dim]) * 32, layout, arena=True)
                    await asyncio.gather(
                        churn(one, sizes[0], 2 * turn, pages // 20), churn(two, sizes[1], 2 * turn + 1, pages // 20)
                    )
                async with CacheClient(listen) as cache:
                    while (stats := await cache.stats()).leases or stats.attachments:
                        await asyncio.sleep(0.1)
                    assert stats.reservations == stats.quarantined == 0
                figures.append(held(service))
            print(figures)
            # What a service holds at most it holds after four million operations.
            resident, descriptors, files = zip(*figures[4:], strict=True)
            assert max(resident) < resident[0] + 16 * MIB
            assert max(descriptors) <= descriptors[0] + 2
            assert max(files) <= files[0] + 2

    asyncio.run(scenario())
