"""The disk tier in this process: flipped bytes, lost indexes, failing system calls, restarts."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from katydid_cache.records import BlockMissReason, PutOutcome, PutRefusal, PutStatus
from katydid_kvcache.cache import Cache
from katydid_kvcache.disk.catalog import Catalog
from katydid_kvcache.disk.recovery import lock_folder
from katydid_kvcache.disk.segments import SegmentFiles
from katydid_kvcache.disk.tier import _Barrier
from katydid_kvcache.settings import KvCacheSettings
from katydid_runtime.errors import OverloadedError, SettingsError

from tests.kvcache.inside import BLOCK, durably, flip, get, key, opened, payload, put
from tests.kvcache.running import IDENTITY, MIB, run


def test_the_disk_follows_when_it_was_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, memory_bytes=8 * MIB, disk_queue_bytes=MIB) as (cache, space):
            for name in range(150):
                put(cache, space, name)
            assert cache.writer.bytes_in_flight <= MIB
            assert cache.store.disk is not None
            while cache.store.disk.blocks < 150:
                await asyncio.sleep(0.005)
            assert cache.store.disk.counters.shed == 0

    run(scenario)


def test_what_is_evicted_before_the_disk_got_to_it_is_shed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, memory_bytes=2 * MIB, disk_queue_bytes=MIB) as (cache, space):
            for name in range(150):
                assert put(cache, space, name).status is PutStatus.STORED
            await cache.flush()
            assert cache.store.disk is not None
            while cache.writer.bytes_in_flight:
                await asyncio.sleep(0.005)
            there = cache.store.disk.blocks
            assert 0 < there < 150
            assert cache.store.disk.counters.shed == 150 - there

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
                flip(tmp_path, block.disk.slab, block.disk.index, dice.randrange(296 + BLOCK))
            served = [await get(cache, space, name) for name in range(60)]
            assert set(served) <= {BlockMissReason.CORRUPT, BlockMissReason.ABSENT}
            assert not space.blocks

    run(scenario)


def test_restart_finds_blocks_by_index_and_by_scan(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            for name in range(30):
                await durably(cache, space, name)
            assert await cache.evict(IDENTITY, [key(3)]) == 1
        for loss in ("nothing", "index", "garbage"):
            if loss == "index":
                for file in (tmp_path / "index").iterdir():
                    file.unlink()
            if loss == "garbage":
                (tmp_path / "index" / "data.mdb").write_bytes(os.urandom(100_000))
            async with opened(tmp_path) as (cache, space):
                assert len(space.blocks) == 29, loss
                for name in range(30):
                    assert await get(cache, space, name) == (BlockMissReason.ABSENT if name == 3 else payload(name))

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
            assert await get(cache, space, 1) == BlockMissReason.ABSENT
            assert key(1) not in space.blocks, "it is not looked for again"
            assert await get(cache, space, 2) == payload(2)

    run(scenario)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_failing_disk_degrades_to_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            await durably(cache, space, 1)
            monkeypatch.setattr(SegmentFiles, "write", fail)
            refused = await durably(cache, space, 2)
            assert refused.status is PutStatus.REFUSED
            assert refused.refusal is (PutRefusal.DISK_FULL if code == errno.ENOSPC else PutRefusal.DISK_FAILING)
            told = "the disk is full" if code == errno.ENOSPC else "disk write failed"
            assert [record for record in caplog.records if record.message.startswith(told)]
            assert await get(cache, space, 2) == payload(2)
            assert put(cache, space, 3).status is PutStatus.STORED
            assert cache.store.disk is not None
            assert cache.store.disk.counters.shed > 0
            with pytest.raises(OverloadedError):
                await cache.flush()
            monkeypatch.setattr(SegmentFiles, "read", fail)
            cache.store.leave(cache.store.memory, space.blocks[key(1)])
            assert await get(cache, space, 1) == BlockMissReason.STORE_UNAVAILABLE
            monkeypatch.undo()
            assert await get(cache, space, 1) == payload(1)

    run(scenario)


def test_a_defect_while_committing_hangs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            monkeypatch.setattr("katydid_kvcache.disk.tier.Row.of", defect)
            assert await durably(cache, space, 1) == PutOutcome(PutStatus.REFUSED, PutRefusal.DISK_FAILING)
            monkeypatch.undo()
            assert (await durably(cache, space, 2)).status is PutStatus.STORED

    run(scenario)


def test_a_defect_of_one_listener_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queued = threading.Event()

    def apply_when_all_are_queued(self: Catalog, *changes: Any) -> None:
        assert queued.wait(10)
        apply(self, *changes)

    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            disk = cache._disk
            assert disk is not None
            disk.delete(IDENTITY, key(1))  # the committer waits with it, so that what follows is one group
            writing = asyncio.create_task(durably(cache, space, 2))
            await asyncio.sleep(0)
            disk._queue.put(_Barrier(lambda: 1 // 0))
            flushing = asyncio.create_task(disk.flush())
            await asyncio.sleep(0)
            queued.set()
            await asyncio.wait_for(flushing, 10)
            assert (await writing).status is PutStatus.STORED
        assert "ZeroDivisionError" in caplog.text

    apply = Catalog.apply
    monkeypatch.setattr(Catalog, "apply", apply_when_all_are_queued)
    run(scenario)


def test_a_full_index_degrades_to_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, index_map_bytes=16 * MIB) as (cache, space):
            assert cache._disk is not None
            cache._disk._catalog._env.set_mapsize(4096 * 8)
            outcomes = [await durably(cache, space, name) for name in range(40)]
            assert {outcome.refusal for outcome in outcomes} >= {PutRefusal.DISK_FAILING}
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
            verified = await cache.scrubber.verify()
            assert (verified.blocks, verified.corrupt) == (10, 2)
            assert [tier.counters.corrupt for tier in cache.store.tiers] == [1, 1]
            assert [await get(cache, space, name) for name in (1, 2)] == [payload(1), payload(2)]

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


def test_a_start_that_was_cut_off_leaves_a_folder_that_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").touch()
    os.close(lock_folder(tmp_path))
    assert (tmp_path / "FORMAT").read_text().startswith("katydid-kvcache disk tier")


def test_verify_tells_of_copies_that_can_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            for name in range(1, 5):
                await durably(cache, space, name)
            original = SegmentFiles.read

            def failing(self: SegmentFiles, number: int, slot_bytes: int, offset: int, buffers: Any) -> None:
                if offset == 0:
                    raise OSError(errno.EIO, "the medium has a hole")
                original(self, number, slot_bytes, offset, buffers)

            monkeypatch.setattr(SegmentFiles, "read", failing)
            assert await cache.scrubber.verify() == (4, 0, 1)

    run(scenario)
