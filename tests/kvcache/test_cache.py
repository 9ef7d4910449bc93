"""The cache in this process: tiers, heads of several ranks, times to live, and bytes that flip in memory."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
from katydid_cache.asking import Asker
from katydid_cache.layout import Span
from katydid_cache.records import BlockMissReason, PutOutcome, PutRefusal, PutStatus, Tier
from katydid_kvcache import cache as cache_module
from katydid_kvcache.policy.lifetimes import Keep, Lifetime, SessionTerms
from katydid_kvcache.reading import Reading
from katydid_kvcache.store import Write
from katydid_runtime.errors import ConflictError, SettingsError
from xxhash import xxh3_128_digest

from tests.kvcache.inside import BLOCK, durably, get, key, opened, payload, put
from tests.kvcache.running import MIB, run


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
                assert await get(cache, space, name) == BlockMissReason.CORRUPT
                assert await get(cache, space, name) == BlockMissReason.ABSENT
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


def test_heads_written_by_two_ranks_make_a_block_visible_together() -> None:
    async def scenario() -> None:
        async with opened() as (cache, space):
            assert put(cache, space, 1, heads=Span(0, 1)).status is PutStatus.STORED
            assert await get(cache, space, 1) == BlockMissReason.ABSENT
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
            assert put(cache, space, 1, heads=Span(1, 1)) == PutOutcome(PutStatus.REFUSED, PutRefusal.CORRUPT)
            assert await get(cache, space, 1) == BlockMissReason.ABSENT

    run(scenario)


def test_wrong_checksum_is_refused_and_leaves_nothing() -> None:
    async def scenario() -> None:
        async with opened() as (cache, space):
            begun = cache.store.begin_write(space, key(1), b"", Span(0, 2))
            assert isinstance(begun, Write)
            assert cache.writer.finish(begun, bytes(16), Keep()) == PutOutcome(PutStatus.REFUSED, PutRefusal.CHECKSUM)
            assert not space.blocks

    run(scenario)


def test_memory_alone_has_nowhere_to_be_written_to() -> None:
    async def scenario() -> None:
        async with opened() as (cache, _):
            with pytest.raises(ConflictError, match="memory alone"):
                await cache.flush()

    run(scenario)


def test_time_to_live_holds_in_all_tiers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            put(cache, space, 1, ttl_s=0.05)
            put(cache, space, 2)
            await cache.flush()
            await asyncio.sleep(0.06)
            assert await get(cache, space, 1) == BlockMissReason.ABSENT
        async with opened(tmp_path) as (cache, space):
            assert await get(cache, space, 1) == BlockMissReason.ABSENT
            assert await get(cache, space, 2) == payload(2)

    run(scenario)


def test_prefetch_brings_blocks_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (cache, space):
            for name in range(8):
                await durably(cache, space, name)
                cache.store.leave(cache.store.memory, space.blocks[key(name)])
            blocks, eta_s = cache.prefetching.start(1, space, [key(name) for name in range(9)], 10.0)
            assert blocks == 8
            assert eta_s > 0
            while any(space.blocks[key(name)].memory is None for name in range(8)):
                await asyncio.sleep(0.005)

    run(scenario)


class Clock:
    """The wall clock, set on by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + self.ahead_s)


def test_a_sliding_block_lives_on_with_every_use_and_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        clock = Clock(monkeypatch)
        async with opened(tmp_path) as (cache, space):
            attachment = cache.attachments.join(space, arena=False)
            for name, sliding in ((1, True), (2, False)):
                put(cache, space, name, ttl_s=100, sliding=sliding)
            await cache.flush()
            for _ in range(3):
                clock.ahead_s += 60
                cache.lookup(attachment, [key(1)], Span(0, 2), None)
                await asyncio.sleep(0)
            cache.store.expire()
            assert await get(cache, space, 1) == payload(1)
            assert await get(cache, space, 2) == BlockMissReason.ABSENT
        clock.ahead_s += 70
        async with opened(tmp_path) as (cache, space):
            assert await get(cache, space, 1) == payload(1)
            clock.ahead_s += 60
            assert await get(cache, space, 1) == BlockMissReason.ABSENT

    run(scenario)


def test_blocks_found_by_a_session_live_as_long_as_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        clock = Clock(monkeypatch)
        async with opened(tmp_path) as (cache, space):
            attachment = cache.attachments.join(space, arena=False)
            put(cache, space, 1, ttl_s=20)
            put(cache, space, 2, ttl_s=20)
            session = SessionTerms(b"s" * 16, Lifetime(3000))
            cache.lookup(attachment, [key(1)], Span(0, 2), None, session=session)
            await asyncio.sleep(0)
            clock.ahead_s += 25
            cache.store.expire()
            assert await get(cache, space, 1) == payload(1)
            assert await get(cache, space, 2) == BlockMissReason.ABSENT

    run(scenario)


def test_a_full_disk_takes_at_the_second_use_what_it_did_not_admit_at_the_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        policy = tmp_path / "policy.yaml"
        policy.write_text("tiers: {disk: {bytes: 1048576, admission: second_touch}}\n")
        async with opened(tmp_path / "disk", disk_bytes=None, policy_file=str(policy)) as (cache, space):
            attachment = cache.attachments.join(space, arena=False)
            for name in range(60):
                put(cache, space, name)
                await asyncio.sleep(0)
            while cache.writer.bytes_in_flight:
                await asyncio.sleep(0.01)
            last = space.blocks[key(59)]
            assert last.disk is None, "the disk was full, and the block new"
            for _ in range(2):
                cache.lookup(attachment, [key(59)], Span(0, 2), None)
            while last.disk is None:
                await asyncio.sleep(0.01)

    run(scenario)


def test_figures_by_tenant() -> None:
    async def scenario() -> None:
        alice, bob = Asker(b"a" * 16), Asker(b"b" * 16)
        async with opened() as (cache, space):
            attachment = cache.attachments.join(space, arena=False)
            put(cache, space, 1, tenant=alice.tenant)
            for asker in (alice, bob):
                cache.lookup(attachment, [key(1), key(2)], Span(0, 2), None, asker)
            await cache.aftermath.done()
            for asker, shared in ((alice, 0), (bob, 1)):
                figures = cache.tenants.of(asker.tenant)
                assert figures.hit_tokens == {Tier.MEMORY: 64}
                assert figures.hit_bytes == {Tier.MEMORY: BLOCK}
                assert (figures.missed_tokens, figures.shared_hits) == (64, shared)
                assert cache.tenants.saved_prefill_s(figures) == 64 / cache.settings.prefill_tokens_per_s
            assert cache.store.memory.pools.held == {alice.tenant: space.slot_bytes}

    run(scenario)


def test_slots_whose_client_never_learned_of_them_are_written_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a Reserve may come too late for who asked; it lives on, and must not keep the slots for ever."""
    monkeypatch.setattr(cache_module, "_RESERVATION_S", 0.2)

    async def scenario() -> None:
        async with opened() as (cache, space):
            maintaining = asyncio.create_task(cache.maintain())
            one, other = (cache.attachments.join(space, arena=True) for _ in range(2))
            lost, begun = cache.reserve(one, [key(1)], [b""], Span(), 0.0)
            assert isinstance(begun[0], Write)
            assert put(cache, space, 1).refusal is PutRefusal.BUSY
            while len(cache.reservations):
                await asyncio.sleep(0.02)
            assert isinstance(cache.reserve(other, [key(1)], [b""], Span(), 0.0)[1][0], Write)
            with pytest.raises(ConflictError, match="no reservation"):
                cache.reservations.find(one.id, lost)
            for attachment in (one, other):
                cache.detach(attachment)
            maintaining.cancel()

    run(scenario)


def test_more_memory_than_the_host_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "host_memory_bytes", lambda: 3 * MIB)

    async def scenario() -> None:
        with pytest.raises(SettingsError, match="memory_bytes is 4194304, and this host has 3145728") as caught:
            async with opened(memory_bytes=4 * MIB):
                raise AssertionError("its pages would be touched one after another until the kernel ends the process")
        assert (caught.value.field, caught.value.allowed) == ("memory_bytes", "at most 3145728")

    run(scenario)
