"""Put and get of a client on the service's host: they go through the shared memory, and look as over streams."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from katydid_cache import (
    BlockMissReason,
    CacheClient,
    Durability,
    PutBlock,
    PutOutcome,
    PutRefusal,
    PutStatus,
    Span,
    Tier,
    arena_copies,
)
from katydid_runtime.errors import UnavailableError

from tests.kvcache.running import IDENTITY, LAYOUT, MIB, ServiceProcess, chain, make, run

pytestmark = pytest.mark.e2e

BLOCK = LAYOUT.block_bytes
STORED, PRESENT = PutOutcome(PutStatus.STORED), PutOutcome(PutStatus.PRESENT)


def buffers(count: int, size: int = BLOCK) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    listen = f"unix:{tmp_path}/cache.sock"
    with ServiceProcess(tmp_path, listen=listen, memory_bytes=4 * MIB):
        yield listen


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which streaming calls were made."""
    made: list[str] = []
    original = CacheClient.__init__

    def watched(self: CacheClient, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        for name in ("_get_call", "_put_call"):
            call = getattr(self, name)
            setattr(self, name, lambda *a, name=name, call=call, **o: (made.append(name), call(*a, **o))[1])

    monkeypatch.setattr(CacheClient, "__init__", watched)
    return made


def test_no_stream_is_needed(address: str, streams: list[str]) -> None:
    async def scenario() -> None:
        async with CacheClient(address) as cache:
            await cache.attach(IDENTITY, LAYOUT, arena=True)
            blocks = make(30)
            assert await cache.put(blocks) == [STORED] * 30
            assert await cache.put(blocks[:3], hold_s=5.0) == [PRESENT] * 3
            found = await cache.lookup(chain(blocks))
            into = buffers(30)
            result = await cache.get(found.lease, chain(blocks), into=into)
            assert result.prefix == 30
            assert [(time.tier, time.blocks) for time in result.times] == [(Tier.MEMORY, 30)]
            assert [bytes(buffer) for buffer in into] == [block.payload for block in blocks]
            part = [memoryview(bytearray(LAYOUT.payload_bytes(Span(1, 1), Span(1, 2))))]
            one = blocks[7]
            assert (await cache.get(found.lease, one.hash, into=part, heads=Span(1, 1), layers=Span(1, 2))).found == (
                True,
            )
            payload = memoryview(one.payload)
            runs = LAYOUT.runs(Span(1, 1), Span(1, 2))
            assert part[0] == b"".join(payload[run.start : run.stop] for run in runs)
            await cache.release(found.lease)
        assert streams == []

    run(scenario)


def test_heads_go_into_their_places(address: str) -> None:
    async def scenario() -> None:
        async with CacheClient(address) as one, CacheClient(address) as two:
            whole = make(3)
            for rank, cache in enumerate((one, two)):
                await cache.attach(IDENTITY, LAYOUT, arena=True)
                runs = LAYOUT.runs(Span(rank, 1))
                shares = [
                    block._replace(payload=b"".join(block.payload[run.start : run.stop] for run in runs))
                    for block in whole
                ]
                assert await cache.put(shares, heads=Span(rank, 1)) == [STORED] * 3
            found = await one.lookup(chain(whole))
            into = buffers(3)
            assert (await one.get(found.lease, chain(whole), into=into)).prefix == 3
            assert [bytes(buffer) for buffer in into] == [block.payload for block in whole]

    run(scenario)


def test_what_is_present_reaches_the_disk_before_it_is_said(address: str) -> None:
    async def scenario() -> None:
        async with CacheClient(address) as cache:
            await cache.attach(IDENTITY, LAYOUT, arena=True)
            blocks = make(20)
            await cache.put(blocks[:10])
            outcomes = await cache.put(blocks, durability=Durability.DISK)
            assert outcomes == [PRESENT] * 10 + [STORED] * 10
            assert (await cache.stats()).tiers[Tier.DISK].blocks == 20

    run(scenario)


def test_flipped_bytes_in_the_shared_memory_do_not_arrive(address: str) -> None:
    async def scenario() -> None:
        async with CacheClient(address) as cache:
            await cache.attach(IDENTITY, LAYOUT, arena=True)
            blocks = make(2)
            await cache.put(blocks, durability=Durability.DISK)
            found = await cache.lookup(chain(blocks))
            cache.in_place.view(found.slots[0])[50] ^= 4
            into = buffers(2)
            # The stream finds the slot bad, too, and reads the block from disk.
            assert (await cache.get(found.lease, chain(blocks), into=into)).prefix == 2
            assert [bytes(buffer) for buffer in into] == [block.payload for block in blocks]
            await cache.release(found.lease)

    run(scenario)


def test_a_cancelled_put_leaves_nothing_reserved(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is written any more once it has returned: the caller may use its buffers again."""
    copied: list[int] = []
    original = arena_copies._copy

    def slow(target: Any, source: Any) -> bytes:
        result = original(target, source)
        copied.append(len(target))
        time.sleep(0.05)
        return result

    monkeypatch.setattr(arena_copies, "_copy", slow)

    async def scenario() -> None:
        async with CacheClient(address) as cache:
            await cache.attach(IDENTITY, LAYOUT, arena=True)
            blocks = make(8)
            putting = asyncio.create_task(cache.put(blocks))
            while not copied:
                await asyncio.sleep(0.005)
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
            before = len(copied)
            await asyncio.sleep(0.15)
            assert len(copied) == before < 8
            while (await cache.stats()).reservations:
                await asyncio.sleep(0.01)
            assert (await cache.lookup(chain(blocks))).blocks == 0
            assert await cache.put(blocks) == [STORED] * 8

    run(scenario)


def test_no_room_and_a_dead_service_are_outcomes(tmp_path: Path) -> None:
    async def scenario() -> None:
        listen = f"unix:{tmp_path}/cache.sock"
        service = ServiceProcess(listen=listen, memory_bytes=MIB).start()
        try:
            async with CacheClient(listen, degrade=True) as cache:
                await cache.attach(IDENTITY, LAYOUT, arena=True)
                blocks = make(MIB // BLOCK)
                assert await cache.put(blocks) == [STORED] * len(blocks)
                found = await cache.lookup(chain(blocks))
                assert await cache.put(make(1)) == [PutOutcome(PutStatus.REFUSED, PutRefusal.NO_ROOM)]
                service.kill()
                into = buffers(2)
                # What is leased is in this process still, and right.
                result = await cache.get(found.lease, chain(blocks[:2]), into=into)
                assert result.prefix == 2 or set(result.misses.values()) == {BlockMissReason.STORE_UNAVAILABLE}
                while cache.attached:
                    await asyncio.sleep(0.01)
                outcomes = await cache.put([PutBlock(os.urandom(32), b"", bytes(BLOCK))])
                assert outcomes == [PutOutcome(PutStatus.REFUSED, PutRefusal.STORE_UNAVAILABLE)]
        finally:
            if service.process.poll() is None:
                service.kill()

    run(scenario)


def test_a_slot_that_is_another_block_s_in_mid_copy_does_not_arrive(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease may run out under a reader: what it copied counts only if the slot holds the block after that."""

    async def scenario() -> None:
        async with CacheClient(address) as cache:
            await cache.attach(IDENTITY, LAYOUT, arena=True)
            (block,) = make(1)
            await cache.put([block])
            found = await cache.lookup(block.hash)
            view, payload = cache.in_place.view(found.slots[0]), memoryview(block.payload)
            original = arena_copies._gather

            def overtaken(target: Any, source: Any, runs: Any) -> None:
                view[:] = bytes(BLOCK)
                original(target, source, runs)

            monkeypatch.setattr(arena_copies, "_gather", overtaken)
            (into,) = buffers(1, BLOCK // 2)
            got = await cache.get(found.lease, block.hash, into=[into], heads=Span(1, 1))
            right = b"".join(payload[run.start : run.stop] for run in LAYOUT.runs(Span(1, 1)))
            assert not got.found[0] or bytes(into) == right

    run(scenario)


@pytest.mark.parametrize("degrade", [False, True])
@pytest.mark.parametrize("trouble", ["closed", "attached anew"])
def test_a_put_under_which_the_memory_goes_away_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch, trouble: str, degrade: bool
) -> None:
    async def scenario() -> None:
        cache = CacheClient(address, degrade=degrade)
        await cache.attach(IDENTITY, LAYOUT, arena=True)
        original = cache._copies._beside

        async def beside(work: Any) -> None:
            if trouble == "closed":
                await cache.close()
            elif cache._attachment is not None:
                cache._attachment._drop_arena()
            await original(work)

        await cache.put(make(1))
        monkeypatch.setattr(cache._copies, "_beside", beside)
        if degrade:
            refused = PutOutcome(PutStatus.REFUSED, PutRefusal.STORE_UNAVAILABLE)
            assert await cache.put(make(2)) == [refused] * 2
        else:
            with pytest.raises(UnavailableError):
                await cache.put(make(2))
        await cache.close()

    run(scenario)
