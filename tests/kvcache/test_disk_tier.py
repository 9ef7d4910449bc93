"""The disk tier itself: what a read believes, how long a failing disk is left alone, and whose writes a failure is."""

from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from katydid_cache.records import PutRefusal, PutStatus
from katydid_kvcache.disk import tier
from katydid_kvcache.disk.catalog import Row
from katydid_kvcache.disk.segments import SegmentFiles
from katydid_kvcache.slabs import Slot
from katydid_runtime.errors import DataCorruptError, NotFoundError

from tests.kvcache.inside import BLOCK, durably, flip, get, key, opened, payload, put
from tests.kvcache.running import MIB, run
from tests.kvcache.test_shared_tier import shared

SLOT = 4096 + BLOCK
BROKEN = OSError(errno.EIO, "broken")


def test_a_read_believes_neither_an_old_generation_nor_another_checksum(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            await durably(cache, space, 1)
            block, disk = space.blocks[key(1)], cache._disk
            assert disk is not None
            assert block.disk is not None
            row, into = Row.of_block(block, block.disk), cache.memory.pages(block, block.memory or block.disk)
            await disk.read(row, SLOT, into, BLOCK)
            before = Slot(block.disk.slab, block.disk.index, block.disk.generation - 1)
            with pytest.raises(NotFoundError):
                await disk.read(replace(row, slot=before), SLOT, into, BLOCK)
            with pytest.raises(DataCorruptError):
                await disk.read(replace(row, checksum=bytes(16)), SLOT, into, BLOCK)

    run(scenario)


def test_a_failing_disk_is_left_alone_for_twice_as_long_each_time_until_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, _):
            disk, now = cache._disk, [100.0]
            assert disk is not None
            monkeypatch.setattr(tier.time, "monotonic", lambda: now[0])
            for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
                disk._judge([None, BROKEN])
                now[0] += pause - 0.01
                assert not disk.healthy
                now[0] += 0.01
                assert disk.healthy
            disk._judge([OSError(errno.ENOSPC, "full")])
            assert disk.healthy, "a disk that is full does not fail"
            disk._judge([None])
            disk._judge([BROKEN])
            now[0] += 1.0
            assert disk.healthy, "it has worked meanwhile"
            monkeypatch.undo()

    run(scenario)


def test_a_flush_that_fails_fails_the_writes_to_that_segment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_slab = MIB // SLOT

    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            for name in range(per_slab - 1):
                await durably(cache, space, name)
            original = SegmentFiles.sync

            def broken(self: SegmentFiles, number: int) -> None:
                if number == 0:
                    raise BROKEN
                original(self, number)

            monkeypatch.setattr(SegmentFiles, "sync", broken)
            outcomes = [put(cache, space, name) for name in (100, 101)]
            tasks = [
                cache.writer.reach_disk(space.blocks[key(name)], outcome)
                for name, outcome in zip((100, 101), outcomes, strict=True)
            ]
            reached = await asyncio.gather(*tasks)
            assert [outcome.refusal for outcome in reached] == [PutRefusal.DISK_FAILING, None]
            assert space.blocks[key(100)].disk is None
            assert space.blocks[key(101)].disk is not None

    run(scenario)


def test_writes_that_must_reach_the_disk_wait_for_room_in_its_queue(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, memory_bytes=4 * MIB, disk_queue_bytes=MIB) as (cache, space):
            outcomes = [put(cache, space, name) for name in range(100)]
            reaching = [
                cache.writer.reach_disk(space.blocks[key(name)], outcome) for name, outcome in enumerate(outcomes)
            ]
            while not all(task.done() for task in reaching):
                assert cache.writer.bytes_in_flight <= MIB
                await asyncio.sleep(0)
            assert {task.result().status for task in reaching} == {PutStatus.STORED}

    run(scenario)


def test_what_waits_for_a_disk_that_hangs_is_no_more_than_what_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = threading.Event()
    original = SegmentFiles.write

    def hang(self: SegmentFiles, *words: Any) -> None:
        assert hanging.wait(30)
        original(self, *words)

    monkeypatch.setattr(SegmentFiles, "write", hang)

    async def scenario() -> None:
        async with opened(tmp_path, disk_queue_bytes=MIB) as (cache, space):
            assert cache.store.disk is not None
            for name in range(500):
                put(cache, space, name)
                assert len(cache.writer._backlog) <= cache.store.memory.blocks
            assert cache.store.disk.counters.sheds["queue_full"] > 300
            hanging.set()

    run(scenario)


def test_a_full_disk_is_not_written_to_for_what_it_does_not_admit(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("tiers: {disk: {admission: second_touch}}\n")

    async def scenario() -> None:
        async with opened(tmp_path / "disk", disk_bytes=MIB, policy_file=str(policy)) as (cache, space):
            disk, fits = cache.store.disk, MIB // SLOT
            assert disk is not None
            for name in range(fits + 10):
                put(cache, space, name)
            while cache.writer.bytes_in_flight:
                await asyncio.sleep(0.005)
            assert (disk.counters.writes, disk.counters.evictions, disk.counters.shed) == (fits, 0, 0)

    run(scenario)


def test_a_block_that_rots_on_disk_is_read_from_the_shared_store(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path / "disk", **shared(tmp_path)) as (cache, space):
            await durably(cache, space, 1)
            await cache.flush()
            block = space.blocks[key(1)]
            assert block.shared is not None
            assert block.disk is not None
            cache.store.leave(cache.store.memory, block)
            flip(tmp_path / "disk", block.disk.slab, block.disk.index, 1000)
            assert await get(cache, space, 1) == payload(1)
            assert cache.store.disk is not None
            assert cache.store.disk.counters.corrupt == 1

    run(scenario)
