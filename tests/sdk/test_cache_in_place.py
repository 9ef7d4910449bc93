"""Blocks in the service's shared memory, from a second process: written, read, lost and found again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from katydid_cache import (
    ArenaSlot,
    BlockMissReason,
    CacheClient,
    Durability,
    PutOutcome,
    PutRefusal,
    PutStatus,
    Reservation,
    Span,
    Tier,
)
from katydid_kernels import linear_checksum
from katydid_runtime.errors import ConflictError, InvalidRequestError, UnavailableError, UnsupportedError
from xxhash import xxh3_128_digest

from tests.kvcache.running import IDENTITY, LAYOUT, ServiceProcess

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
BLOCK = LAYOUT.block_bytes
STORED = PutOutcome(PutStatus.STORED)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def address(folder: Path) -> str:
    return f"unix:{folder}/cache.sock"


async def write(cache: CacheClient, payloads: dict[bytes, bytes], **options: Durability) -> list[PutOutcome]:
    reservation = await cache.in_place.reserve(b"".join(payloads))
    checksums = []
    for slot, payload in zip(reservation.slots, payloads.values(), strict=True):
        if slot is not None:
            cache.in_place.view(slot)[:] = payload
            checksums.append(xxh3_128_digest(payload))
    return await cache.in_place.commit(reservation, checksums, **options)


def make(count: int) -> dict[bytes, bytes]:
    return {os.urandom(32): os.urandom(BLOCK) for _ in range(count)}


def test_written_in_place_and_read_both_ways(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ServiceProcess(tmp_path, listen=address(tmp_path)):
            async with CacheClient(address(tmp_path)) as cache:
                await cache.attach(IDENTITY, LAYOUT, arena=True)
                blocks = make(20)
                assert await write(cache, blocks, durability=Durability.DISK) == [STORED] * 20
                assert await write(cache, blocks) == []
                found = await cache.lookup(b"".join(blocks))
                assert (found.blocks, len(found.slots)) == (20, 20)
                for slot, payload in zip(found.slots, blocks.values(), strict=True):
                    assert cache.in_place.intact(slot)
                    assert cache.in_place.view(slot) == payload
                into = [memoryview(bytearray(BLOCK)) for _ in blocks]
                assert (await cache.get(found.lease, b"".join(blocks), into=into)).prefix == 20
                assert [bytes(buffer) for buffer in into] == list(blocks.values())
                assert len({slot.generation for slot in found.slots}) == 20
                await cache.release(found.lease)
                assert not (await cache.lookup(b"".join(blocks), lease=False)).slots
                stats = await cache.stats()
                assert (stats.reservations, stats.tiers[Tier.DISK].blocks) == (0, 20)

    run(scenario)


def test_ranks_write_their_heads_in_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ServiceProcess(listen=address(tmp_path)):
            async with CacheClient(address(tmp_path)) as one, CacheClient(address(tmp_path)) as two:
                ((block_hash, payload),) = make(1).items()
                for rank, cache in enumerate((one, two)):
                    await cache.attach(IDENTITY, LAYOUT, arena=True)
                    reservation = await cache.in_place.reserve(block_hash, heads=Span(rank, 1))
                    (slot,) = reservation.slots
                    assert slot is not None
                    share = b""
                    for part in LAYOUT.runs(Span(rank, 1)):
                        cache.in_place.view(slot)[part.start : part.stop] = payload[part.start : part.stop]
                        share += payload[part.start : part.stop]
                    assert await cache.in_place.commit(reservation, [xxh3_128_digest(share)]) == [STORED]
                found = await one.lookup(block_hash)
                assert one.in_place.view(found.slots[0]) == payload
                assert found.slots[0].checksum == xxh3_128_digest(payload)

    run(scenario)


def test_a_wrong_checksum_commits_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ServiceProcess(listen=address(tmp_path)):
            async with CacheClient(address(tmp_path)) as cache:
                await cache.attach(IDENTITY, LAYOUT, arena=True)
                blocks = make(2)
                reservation = await cache.in_place.reserve(b"".join(blocks))
                slots = [slot for slot in reservation.slots if slot is not None]
                for slot, payload in zip(slots, blocks.values(), strict=True):
                    cache.in_place.view(slot)[:] = payload
                cache.in_place.view(slots[1])[7] ^= 1
                checksums = [xxh3_128_digest(payload) for payload in blocks.values()]
                statuses = await cache.in_place.commit(reservation, checksums)
                assert statuses == [STORED, PutOutcome(PutStatus.REFUSED, PutRefusal.CHECKSUM)]
                assert (await cache.lookup(b"".join(blocks))).blocks == 1
                with pytest.raises(ConflictError):
                    await cache.in_place.commit(reservation, checksums)

    run(scenario)


def test_what_a_gpu_wrote_is_committed_by_its_linear_checksum(tmp_path: Path) -> None:
    """And keeps it beside the xxh3-128, over a restart as well."""

    async def scenario() -> None:
        blocks = make(3)
        chain = b"".join(blocks)
        sums = [linear_checksum(payload) for payload in blocks.values()]
        with ServiceProcess(tmp_path, listen=address(tmp_path)):
            async with CacheClient(address(tmp_path)) as cache:
                await cache.attach(IDENTITY, LAYOUT, arena=True)
                reservation = await cache.in_place.reserve(chain)
                for slot, payload in zip(reservation.slots, blocks.values(), strict=True):
                    assert slot is not None
                    cache.in_place.view(slot)[:] = payload
                wrong = await cache.in_place.reserve(os.urandom(32))
                assert await cache.in_place.commit(wrong, linear_checksums=[1]) == [
                    PutOutcome(PutStatus.REFUSED, PutRefusal.CHECKSUM)
                ]
                outcomes = await cache.in_place.commit(reservation, linear_checksums=sums, durability=Durability.DISK)
                assert outcomes == [STORED] * 3
        with ServiceProcess(tmp_path, listen=address(tmp_path)):
            async with CacheClient(address(tmp_path)) as cache:
                await cache.attach(IDENTITY, LAYOUT, arena=True)
                found = await cache.lookup(chain)
                fetched = await cache.prefetch(chain, deadline_s=5, wait=True)
                assert (found.blocks, fetched.blocks, len(fetched.slots)) == (3, 3, 3)
                for slot, total, payload in zip(fetched.slots, sums, blocks.values(), strict=True):
                    assert (slot.linear, slot.checksum) == (total, xxh3_128_digest(payload))
                    assert cache.in_place.view(slot) == payload

    run(scenario)


def test_a_reader_sees_a_flip_in_the_shared_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ServiceProcess(listen=address(tmp_path)):
            async with CacheClient(address(tmp_path)) as cache:
                await cache.attach(IDENTITY, LAYOUT, arena=True)
                blocks = make(1)
                await write(cache, blocks)
                (slot,) = (await cache.lookup(b"".join(blocks))).slots
                cache.in_place.view(slot)[100] ^= 8
                assert not cache.in_place.intact(slot)
                result = await cache.get(0, b"".join(blocks), into=[memoryview(bytearray(BLOCK))])
                assert result.misses == {0: BlockMissReason.CORRUPT}

    run(scenario)


def test_what_a_reader_reports_is_looked_at_and_quarantined_if_it_is_wrong(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ServiceProcess(listen=address(tmp_path)):
            async with CacheClient(address(tmp_path)) as cache:
                await cache.attach(IDENTITY, LAYOUT, arena=True)
                blocks = make(3)
                await write(cache, blocks)
                slots = (await cache.lookup(b"".join(blocks), lease=True)).slots
                cache.in_place.view(slots[1])[100] ^= 8
                unknown = bytes(32)
                assert await cache.report(b"".join((*blocks, unknown))) == 1
                assert (await cache.stats()).quarantined == 1
                assert (await cache.lookup(b"".join(blocks))).blocks == 1, "up to the one that was wrong"
                with pytest.raises(InvalidRequestError, match="hashes"):
                    await cache.report(b"half a hash")

    run(scenario)


def test_what_a_killed_client_held_is_given_back(tmp_path: Path) -> None:
    """Killed while it writes into reserved slots and while it reads leased ones."""
    holder = f"""
import asyncio, os
from katydid_cache import CacheClient
from tests.kvcache.running import IDENTITY, LAYOUT
async def main():
    cache = CacheClient({address(tmp_path)!r})
    await cache.attach(IDENTITY, LAYOUT, arena=True)
    reservation = await cache.in_place.reserve(os.urandom(32 * 50))
    assert all(reservation.slots)
    found = await cache.lookup(bytes(range(32)))
    assert found.lease and len(found.slots) == 1
    print("holds", flush=True)
    while True:
        for slot in reservation.slots:
            cache.in_place.view(slot)[:] = cache.in_place.view(found.slots[0])
asyncio.run(main())
"""

    async def scenario() -> None:
        with ServiceProcess(listen=address(tmp_path)):
            async with CacheClient(address(tmp_path)) as cache:
                await cache.attach(IDENTITY, LAYOUT, arena=True)
                content = os.urandom(BLOCK)
                await write(cache, {bytes(range(32)): content})
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", holder, stdout=subprocess.PIPE, cwd=ROOT
                )
                assert process.stdout is not None
                assert await process.stdout.readline() == b"holds\n"
                stats = await cache.stats()
                assert (stats.reservations, stats.leases) == (1, 1)
                process.kill()
                await process.wait()
                while (stats := await cache.stats()).reservations or stats.leases:
                    await asyncio.sleep(0.01)
                into = [memoryview(bytearray(BLOCK))]
                assert (await cache.get(0, bytes(range(32)), into=into)).found == (True,)
                assert into[0] == content
                # 8 slabs of 32 blocks: all slots can be had again.
                reservation = await cache.in_place.reserve(os.urandom(32 * 256))
                assert all(reservation.slots)

    run(scenario)


def test_a_restart_gives_new_memory_and_the_old_stays_readable(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = ServiceProcess(tmp_path, listen=address(tmp_path)).start()
        async with CacheClient(address(tmp_path)) as cache:
            await cache.attach(IDENTITY, LAYOUT, arena=True)
            blocks = make(3)
            await write(cache, blocks, durability=Durability.DISK)
            old = cache.in_place.view((await cache.lookup(b"".join(blocks))).slots[0])
            mapping = cache.in_place.mapping
            first.kill()
            assert old == next(iter(blocks.values()))
            with ServiceProcess(tmp_path, listen=address(tmp_path)):
                while not cache.attached or cache.in_place.mapping is mapping:
                    await asyncio.sleep(0.01)
                assert old == next(iter(blocks.values()))
                assert not (await cache.lookup(b"".join(blocks))).slots
                await cache.prefetch(b"".join(blocks))
                while len((found := await cache.lookup(b"".join(blocks))).slots) < 3:
                    await cache.release(found.lease)
                for slot, payload in zip(found.slots, blocks.values(), strict=True):
                    assert cache.in_place.view(slot) == payload

    run(scenario)


def test_no_arena_over_tcp_and_wrong_use_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ServiceProcess() as service:
            async with CacheClient(service.address) as cache:
                await cache.attach(IDENTITY, LAYOUT, arena=True)
                assert cache.in_place.mapping is None
                with pytest.raises(UnsupportedError):
                    await cache.in_place.reserve(os.urandom(32))
                with pytest.raises(UnavailableError):
                    cache.in_place.view(ArenaSlot(0, 1, b""))
                reservation = Reservation(1, (ArenaSlot(0, 1, b""),))
                for wrong in ([], [b"short"]):
                    with pytest.raises(InvalidRequestError) as caught:
                        await cache.in_place.commit(reservation, wrong)
                    assert caught.value.field == "checksums"

    run(scenario)
