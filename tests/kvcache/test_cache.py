"""The cache in this process: tiers, integrity and disk faults, with flipped bytes and failing system calls."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from katydid_cache.layout import Span
from katydid_cache.records import PutOutcome, PutStatus
from katydid_kvcache.blocks import Namespace
from katydid_kvcache.cache import Cache
from katydid_kvcache.disk.segments import SegmentFiles
from katydid_kvcache.reading import Reading
from katydid_kvcache.settings import KvCacheSettings
from katydid_kvcache.store import Refusal, Write
from katydid_runtime.errors import OverloadedError, SettingsError
from xxhash import xxh3_128_digest

from tests.kvcache.running import IDENTITY, LAYOUT, MIB

BLOCK = LAYOUT.block_bytes


def payload(name: int, size: int = BLOCK) -> bytes:
    return random.Random(name).randbytes(size)


def key(name: int) -> bytes:
    return name.to_bytes(32, "big")


@asynccontextmanager
async def opened(folder: Path | None = None, **options: object) -> AsyncIterator[tuple[Cache, Namespace]]:
    disk = {"disk_path": str(folder), "disk_bytes": 8 * MIB, "index_map_bytes": 16 * MIB} if folder else {}
    cache = await Cache.open(KvCacheSettings(**({"memory_bytes": 2 * MIB, "slab_bytes": MIB} | disk | options)))
    try:
        yield cache, cache.store.namespace(IDENTITY, LAYOUT)
        cache.store.check_integrity()
    finally:
        await cache.close()


def put(
    cache: Cache, space: Namespace, name: int, *, heads: Span = Span(0, 2), ttl_s: float | None = None
) -> PutOutcome:
    """Write block `name` the way the service does it, in this process."""
    begun = cache.store.begin_write(space, key(name), b"", heads)
    if isinstance(begun, Refusal):
        return PutOutcome(PutStatus.PRESENT if begun.present else PutStatus.REFUSED, begun.reason)
    view, data = cache.memory.view(begun.block), payload(name)
    sent = b""
    for run in LAYOUT.runs(heads):
        view[run.start : run.stop] = data[run.start : run.stop]
        sent += data[run.start : run.stop]
    return cache.writer.finish(begun, xxh3_128_digest(sent), ttl_s)


async def durably(cache: Cache, space: Namespace, name: int) -> PutOutcome:
    outcome = put(cache, space, name)
    return await cache.writer.reach_disk(space.blocks[key(name)], outcome)


async def get(cache: Cache, space: Namespace, name: int, mask: int = 3) -> bytes | str:
    reading = await cache.reader.open(space, key(name), mask)
    if isinstance(reading, str):
        return reading
    try:
        return bytes(reading.view)
    finally:
        cache.reader.close(reading)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_blocks_come_back_from_disk_after_eviction(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            for name in range(150):
                assert (await durably(cache, space, name)).status is PutStatus.STORED
            assert cache.store.memory.counters.evictions > 0
            for name in (0, 1, 149):
                assert await get(cache, space, name) == payload(name)
            assert cache.store.disk is not None
            assert cache.store.disk.blocks == 150

    run(scenario)


def test_concurrent_readers_share_one_promotion(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            await durably(cache, space, 1)
            cache.store.leave(cache.store.memory, space.blocks[key(1)])
            writes = cache.store.memory.counters.writes
            results = await asyncio.gather(*(get(cache, space, 1) for _ in range(8)))
            assert set(results) == {payload(1)}
            assert cache.store.memory.counters.writes == writes + 1

    run(scenario)


def test_a_cancelled_reader_leaves_no_pin(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            await durably(cache, space, 1)
            block = space.blocks[key(1)]
            cache.store.leave(cache.store.memory, block)
            reader = asyncio.create_task(get(cache, space, 1))
            await asyncio.sleep(0)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            assert await get(cache, space, 1) == payload(1)
            assert block.pins == 0

    run(scenario)


def test_a_flipped_bit_in_memory_is_never_served() -> None:
    async def scenario() -> None:
        dice = random.Random(5)
        async with opened() as (cache, space):
            for name in range(20):
                put(cache, space, name)
                cache.memory.view(space.blocks[key(name)])[dice.randrange(BLOCK)] ^= 1 << dice.randrange(8)
                assert await get(cache, space, name) == "corrupt"
                assert await get(cache, space, name) == "absent"
            assert cache.quarantined == 20
            assert put(cache, space, 0).status is PutStatus.STORED
            assert await get(cache, space, 0) == payload(0)

    run(scenario)


def test_a_flipped_bit_in_memory_is_healed_from_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            await durably(cache, space, 1)
            cache.memory.view(space.blocks[key(1)])[77] ^= 4
            assert await get(cache, space, 1) == payload(1)
            assert cache.store.memory.counters.corrupt == 1

    run(scenario)


def test_flipped_bits_on_disk_are_never_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        dice = random.Random(6)
        async with opened(tmp_path) as (cache, space):
            for name in range(60):
                await durably(cache, space, name)
            for name in range(60):
                block = space.blocks[key(name)]
                assert block.disk is not None
                if block.memory is not None:
                    cache.store.leave(cache.store.memory, block)
                flip(tmp_path, block.disk.slab, block.disk.index, dice.randrange(272 + BLOCK))
            served = [await get(cache, space, name) for name in range(60)]
            assert set(served) <= {"corrupt", "absent"}
            assert not space.blocks

    run(scenario)


def flip(folder: Path, slab: int, index: int, at: int) -> None:
    """Flip a byte of a slot: of the header's fields below 272, of the payload above."""
    (segment,) = (folder / "segments").glob(f"{slab:08d}-*.seg")
    position = index * int(segment.stem.partition("-")[2]) + (at if at < 272 else 4096 + at - 272)
    with segment.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


def test_heads_written_by_two_ranks_make_a_block_visible_together() -> None:
    async def scenario() -> None:
        async with opened() as (cache, space):
            assert put(cache, space, 1, heads=Span(0, 1)).status is PutStatus.STORED
            assert await get(cache, space, 1) == "absent"
            half = await cache.reader.open(space, key(1), 1)
            assert isinstance(half, Reading)
            cache.reader.close(half)
            assert put(cache, space, 1, heads=Span(0, 1)).status is PutStatus.PRESENT
            assert put(cache, space, 1, heads=Span(1, 1)).status is PutStatus.STORED
            assert await get(cache, space, 1) == payload(1)
            assert space.blocks[key(1)].checksum == xxh3_128_digest(payload(1))

    run(scenario)


def test_a_part_that_went_bad_spoils_the_block_not_the_answer() -> None:
    async def scenario() -> None:
        async with opened() as (cache, space):
            put(cache, space, 1, heads=Span(0, 1))
            cache.memory.view(space.blocks[key(1)])[0] ^= 1
            assert put(cache, space, 1, heads=Span(1, 1)) == PutOutcome(PutStatus.REFUSED, "corrupt")
            assert await get(cache, space, 1) == "absent"

    run(scenario)


def test_wrong_checksum_is_refused_and_leaves_nothing() -> None:
    async def scenario() -> None:
        async with opened() as (cache, space):
            begun = cache.store.begin_write(space, key(1), b"", Span(0, 2))
            assert isinstance(begun, Write)
            assert cache.writer.finish(begun, bytes(16), None) == PutOutcome(PutStatus.REFUSED, "checksum")
            assert not space.blocks

    run(scenario)


def test_time_to_live_holds_in_all_tiers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            put(cache, space, 1, ttl_s=0.05)
            put(cache, space, 2)
            await cache.flush()
            await asyncio.sleep(0.06)
            assert await get(cache, space, 1) == "absent"
        async with opened(tmp_path) as (cache, space):
            assert await get(cache, space, 1) == "absent"
            assert await get(cache, space, 2) == payload(2)

    run(scenario)


def test_restart_finds_blocks_by_index_and_by_scan(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            for name in range(30):
                await durably(cache, space, name)
            assert cache.evict(IDENTITY, [key(3)]) == 1
        for loss in ("nothing", "index", "garbage"):
            if loss == "index":
                for file in (tmp_path / "index").iterdir():
                    file.unlink()
            if loss == "garbage":
                (tmp_path / "index" / "data.mdb").write_bytes(os.urandom(100_000))
            async with opened(tmp_path) as (cache, space):
                assert len(space.blocks) == 29, loss
                for name in range(30):
                    assert await get(cache, space, name) == ("absent" if name == 3 else payload(name))

    run(scenario)


def test_a_row_whose_slot_was_rewritten_is_absent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            for name in (1, 2):
                await durably(cache, space, name)
            one, two = space.blocks[key(1)], space.blocks[key(2)]
            assert one.disk is not None
            assert two.disk is not None
            (segment,) = (tmp_path / "segments").glob("*.seg")
            slot_bytes = int(segment.stem.partition("-")[2])
            with segment.open("r+b") as file:
                file.seek(two.disk.index * slot_bytes)
                other = file.read(slot_bytes)
                file.seek(one.disk.index * slot_bytes)
                file.write(other)
            for block in (one, two):
                cache.store.leave(cache.store.memory, block)
            assert await get(cache, space, 1) == "absent"
            assert await get(cache, space, 2) == payload(2)

    run(scenario)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_failing_disk_degrades_to_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            await durably(cache, space, 1)
            monkeypatch.setattr(SegmentFiles, "write", fail)
            refused = await durably(cache, space, 2)
            assert refused.status is PutStatus.REFUSED
            assert refused.reason == ("disk_full" if code == errno.ENOSPC else "disk_failing")
            assert await get(cache, space, 2) == payload(2)
            assert put(cache, space, 3).status is PutStatus.STORED
            assert cache.store.disk is not None
            assert cache.store.disk.counters.shed > 0
            with pytest.raises(OverloadedError):
                await cache.flush()
            monkeypatch.setattr(SegmentFiles, "read", fail)
            cache.store.leave(cache.store.memory, space.blocks[key(1)])
            assert await get(cache, space, 1) == "store_unavailable"
            monkeypatch.undo()
            assert await get(cache, space, 1) == payload(1)

    run(scenario)


def test_a_defect_while_committing_hangs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            monkeypatch.setattr("katydid_kvcache.disk.tier.Row.of", defect)
            assert await durably(cache, space, 1) == PutOutcome(PutStatus.REFUSED, "disk_failing")
            monkeypatch.undo()
            assert (await durably(cache, space, 2)).status is PutStatus.STORED

    run(scenario)


def test_a_full_index_degrades_to_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, index_map_bytes=16 * MIB) as (cache, space):
            assert cache._disk is not None
            cache._disk._catalog._env.set_mapsize(4096 * 8)
            outcomes = [await durably(cache, space, name) for name in range(40)]
            assert {outcome.reason for outcome in outcomes} >= {"disk_failing"}
            for name in range(40):
                assert await get(cache, space, name) == payload(name)

    run(scenario)


def test_a_damaged_index_is_rebuilt_from_the_slots(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            for name in range(40):
                await durably(cache, space, name)
        data = tmp_path / "index" / "data.mdb"
        content = bytearray(data.read_bytes())
        for name in range(40):
            at = content.find(IDENTITY + key(name))
            content[at + 64 + name % 80] ^= 0x40
        data.write_bytes(content)
        async with opened(tmp_path) as (cache, space):
            assert [await get(cache, space, name) for name in range(40)] == [payload(name) for name in range(40)]

    run(scenario)


def test_verify_quarantines_bad_copies(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            for name in range(10):
                await durably(cache, space, name)
            cache.memory.view(space.blocks[key(1)])[0] ^= 1
            slot = space.blocks[key(2)].disk
            assert slot is not None
            flip(tmp_path, slot.slab, slot.index, 5000)
            verified = await cache.verify()
            assert (verified.blocks, verified.corrupt) == (10, 2)
            assert [tier.counters.corrupt for tier in cache.store.tiers] == [1, 1]
            assert [await get(cache, space, name) for name in (1, 2)] == [payload(1), payload(2)]

    run(scenario)


def test_prefetch_brings_blocks_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            for name in range(8):
                await durably(cache, space, name)
                cache.store.leave(cache.store.memory, space.blocks[key(name)])
            blocks, eta_s = cache.prefetch(space, [key(name) for name in range(9)], 10.0)
            assert blocks == 8
            assert eta_s > 0
            while any(space.blocks[key(name)].memory is None for name in range(8)):
                await asyncio.sleep(0.005)

    run(scenario)


def test_the_folder_belongs_to_one_service(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path):
            with pytest.raises(SettingsError, match="another service"):
                await Cache.open(KvCacheSettings(disk_path=str(tmp_path)))
        async with opened(tmp_path):
            pass

    run(scenario)


def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_text("katydid-kvcache disk tier, format 99\n")
    with pytest.raises(SettingsError, match="another format"):
        asyncio.run(Cache.open(KvCacheSettings(disk_path=str(tmp_path))))
