"""The cache client against a real service process: every call, and a service that dies, hangs and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from katydid_cache import (
    BlockLayout,
    BlockMissReason,
    CacheClient,
    Durability,
    PutBlock,
    PutOutcome,
    PutRefusal,
    PutStatus,
    Span,
    Tier,
)
from katydid_runtime.errors import (
    ConflictError,
    DeadlineExceededError,
    IdentityMismatchError,
    InvalidRequestError,
    UnavailableError,
)

from tests.kvcache.running import LAYOUT, ServiceProcess

pytestmark = pytest.mark.e2e

STORED, PRESENT = PutOutcome(PutStatus.STORED), PutOutcome(PutStatus.PRESENT)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("disk")) as running:
        yield running


def run(scenario: Callable[[], Awaitable[None]], timeout_s: float = 60) -> None:
    asyncio.run(asyncio.wait_for(scenario(), timeout_s))


def identity() -> bytes:
    """A namespace of the test's own."""
    return os.urandom(32)


def make(count: int, size: int = LAYOUT.block_bytes) -> list[PutBlock]:
    return [PutBlock(os.urandom(32), b"", os.urandom(size)) for _ in range(count)]


def chain(blocks: Sequence[PutBlock]) -> bytes:
    return b"".join(block.hash for block in blocks)


def buffers(count: int, size: int = LAYOUT.block_bytes) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]


def test_round_trip(service: ServiceProcess) -> None:
    async def scenario() -> None:
        async with CacheClient(service.address, name="round-trip") as cache:
            assert await cache.attach(identity(), LAYOUT)
            assert cache.attached
            blocks = make(5)
            assert await cache.put(blocks) == [STORED] * 5
            assert await cache.put(blocks[:2]) == [PRESENT] * 2
            found = await cache.lookup(chain(blocks) + os.urandom(32))
            assert (found.blocks, [(run.tier, run.blocks) for run in found.runs]) == (5, [(Tier.MEMORY, 5)])
            assert found.lease
            assert found.reachable
            into = buffers(6)
            result = await cache.get(found.lease, chain(blocks) + os.urandom(32), into=into)
            assert result.found == (True,) * 5 + (False,)
            assert result.prefix == 5
            assert result.misses == {5: BlockMissReason.ABSENT}
            assert [(time.tier, time.blocks) for time in result.times] == [(Tier.MEMORY, 5)]
            assert [bytes(buffer) for buffer in into[:5]] == [block.payload for block in blocks]
            assert (await cache.stats()).leases == 1
            await cache.release(found.lease)
            await cache.release(found.lease)
            assert (await cache.stats()).leases == 0

    run(scenario)


def test_lookup_ends_at_the_first_gap(service: ServiceProcess) -> None:
    async def scenario() -> None:
        async with CacheClient(service.address) as cache:
            await cache.attach(identity(), LAYOUT)
            blocks = make(4)
            await cache.put([blocks[0], blocks[1], blocks[3]])
            found = await cache.lookup(chain(blocks), lease=False)
            assert (found.blocks, found.lease) == (2, 0)
            assert (await cache.lookup(chain(blocks[2:]))).blocks == 0
            assert (await cache.lookup(b"")).blocks == 0

    run(scenario)


def test_blocks_larger_than_window_and_frame(tmp_path: Path) -> None:
    layout = BlockLayout(layers=80, kv_heads=8, head_dim=128, dtype="bfloat16")

    async def scenario() -> None:
        with ServiceProcess(tmp_path, memory_bytes=96 << 20, slab_bytes=32 << 20, disk_bytes=64 << 20) as big:
            async with CacheClient(big.address) as cache:
                await cache.attach(identity(), layout)
                blocks = make(2, layout.block_bytes)
                assert await cache.put(blocks, durability=Durability.DISK) == [STORED] * 2
                into = buffers(2, layout.block_bytes)
                assert (await cache.get(0, chain(blocks), into=into)).found == (True, True)
                assert [bytes(buffer) for buffer in into] == [block.payload for block in blocks]

    run(scenario)


def test_tensor_parallel_ranks_write_and_read_their_heads(service: ServiceProcess) -> None:
    async def scenario() -> None:
        space = identity()
        whole = os.urandom(LAYOUT.block_bytes)
        block_hash = os.urandom(32)
        shares = [b"".join(whole[run.start : run.stop] for run in LAYOUT.runs(Span(rank, 1))) for rank in range(2)]
        ranks = [CacheClient(service.address, name=f"rank {rank}") for rank in range(2)]
        for rank, cache in enumerate(ranks):
            await cache.attach(space, LAYOUT)
            assert (await cache.lookup(block_hash)).blocks == 0
            (outcome,) = await cache.put([PutBlock(block_hash, b"", shares[rank])], heads=Span(rank, 1))
            assert outcome == STORED
            assert (await cache.lookup(block_hash, heads=Span(rank, 1))).blocks == 1
        (into,) = buffers(1)
        assert (await ranks[0].get(0, block_hash, into=[into])).found == (True,)
        assert into == whole
        (half,) = buffers(1, len(shares[1]))
        assert (await ranks[1].get(0, block_hash, into=[half], heads=Span(1, 1))).found == (True,)
        assert half == shares[1]
        layers = Span(1, 2)
        (part,) = buffers(1, LAYOUT.payload_bytes(layers=layers))
        assert (await ranks[1].get(0, block_hash, into=[part], layers=layers)).found == (True,)
        assert part == whole[LAYOUT.layer_bytes : 3 * LAYOUT.layer_bytes]
        for cache in ranks:
            await cache.close()

    run(scenario)


def test_durable_write_waits_for_all_heads(service: ServiceProcess) -> None:
    async def scenario() -> None:
        space, block_hash = identity(), os.urandom(32)
        share = os.urandom(LAYOUT.block_bytes // 2)
        async with CacheClient(service.address) as cache:
            await cache.attach(space, LAYOUT)
            first = asyncio.create_task(
                cache.put([PutBlock(block_hash, b"", share)], heads=Span(0, 1), durability=Durability.DISK)
            )
            await asyncio.sleep(0.1)
            assert not first.done()
            second = await cache.put([PutBlock(block_hash, b"", share)], heads=Span(1, 1), durability=Durability.DISK)
            assert (await first, second) == ([STORED], [STORED])

    run(scenario)


def test_a_lease_keeps_blocks_and_dies_with_its_client(service: ServiceProcess) -> None:
    async def scenario() -> None:
        async with CacheClient(service.address) as holder, CacheClient(service.address) as flood:
            space = identity()
            await holder.attach(space, LAYOUT)
            await flood.attach(identity(), LAYOUT)
            kept, lost = make(3), make(3)
            await holder.put([*kept, *lost])
            assert (await holder.lookup(chain(kept))).blocks == 3
            # Memory holds 256 blocks and the disk about 900: both turn over.
            for _ in range(6):
                await flood.put(make(200), durability=Durability.DISK)
            assert (await holder.lookup(chain(kept), lease=False)).blocks == 3
            assert (await holder.lookup(chain(lost), lease=False)).blocks == 0
            assert (await flood.stats()).leases == 1
            await holder.close()
            while (stats := await flood.stats()).leases:
                await asyncio.sleep(0.01)
            assert stats.attachments == 1

    run(scenario)


def test_a_lease_ends_in_time(service: ServiceProcess) -> None:
    async def scenario() -> None:
        async with CacheClient(service.address) as cache:
            await cache.attach(identity(), LAYOUT)
            blocks = make(1)
            await cache.put(blocks)
            assert (await cache.lookup(chain(blocks), lease_ttl_s=0.2)).lease
            while (await cache.stats()).leases:
                await asyncio.sleep(0.05)
            with pytest.raises(InvalidRequestError) as caught:
                await cache.lookup(chain(blocks), lease_ttl_s=61.0)
            assert caught.value.field == "lease_ttl"

    run(scenario)


def test_hold_and_time_to_live() -> None:
    async def scenario() -> None:
        with ServiceProcess() as service:
            async with CacheClient(service.address) as cache, CacheClient(service.address) as flood:
                await cache.attach(identity(), LAYOUT)
                await flood.attach(identity(), LAYOUT)
                held, seen, short = make(2), make(1), make(1)
                await cache.put(seen)
                assert await cache.put([*held, *seen], hold_s=30) == [STORED, STORED, PRESENT]
                await cache.put(short, ttl_s=0.05)
                await asyncio.sleep(0.1)
                assert (await cache.lookup(chain(short))).blocks == 0
                for _ in range(3):
                    await flood.put(make(200))
                assert (await cache.lookup(chain([*held, *seen]), lease=False)).blocks == 3

    run(scenario)


def test_prefetch(service: ServiceProcess) -> None:
    async def scenario() -> None:
        async with CacheClient(service.address) as cache:
            await cache.attach(identity(), LAYOUT)
            blocks = make(2)
            await cache.put(blocks, durability=Durability.DISK)
            assert (await cache.prefetch(chain(blocks) + os.urandom(32))).blocks == 2

    run(scenario)


def test_wrong_arguments_are_named(service: ServiceProcess) -> None:
    async def scenario() -> None:
        async with CacheClient(service.address, degrade=True) as cache:
            with pytest.raises(ConflictError, match="attach first"):
                await cache.put(make(1))
            await cache.attach(identity(), LAYOUT)
            with pytest.raises(ConflictError, match="already"):
                await cache.attach(identity(), LAYOUT)
            for call, field in (
                (cache.put([PutBlock(os.urandom(32), b"", b"short")]), "blocks[0].payload"),
                (cache.put([PutBlock(b"short", b"", bytes(LAYOUT.block_bytes))]), "hash"),
                (cache.put(make(1), tenant=b"tenant"), "tenant"),
                (cache.put(make(1), heads=Span(1, 2)), "heads"),
                (cache.lookup(b"short"), "hashes"),
                (cache.get(0, os.urandom(64), into=buffers(1)), "into"),
                (cache.get(0, os.urandom(32), into=buffers(1, 7)), "into[0]"),
                (cache.get(0, os.urandom(32), into=[memoryview(bytes(LAYOUT.block_bytes))]), "into[0]"),
                (cache.get(0, os.urandom(32), into=buffers(1), layers=Span(4, 1)), "layers"),
            ):
                with pytest.raises(InvalidRequestError) as caught:
                    await call
                assert caught.value.field == field
                assert caught.value.allowed

    run(scenario)


@pytest.mark.parametrize("degrade", [False, True])
def test_identity_with_another_layout_is_refused(service: ServiceProcess, degrade: bool) -> None:
    async def scenario() -> None:
        space = identity()
        async with CacheClient(service.address) as first, CacheClient(service.address, degrade=degrade) as second:
            await first.attach(space, LAYOUT)
            with pytest.raises(IdentityMismatchError) as caught:
                await second.attach(space, BlockLayout(layers=4, kv_heads=2, head_dim=16, dtype="float16"))
            assert caught.value.field == "layout"
            assert "bfloat16" in str(caught.value.allowed)

    run(scenario)


def test_death_costs_nothing_once_known_and_restart_reattaches(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = ServiceProcess(tmp_path).start()
        port = first.address.rpartition(":")[2]
        async with CacheClient(first.address, degrade=True) as cache, CacheClient(first.address) as strict:
            space, blocks = identity(), make(3)
            await cache.attach(space, LAYOUT)
            await strict.attach(space, LAYOUT)
            epoch = cache.boot_epoch
            assert await cache.put(blocks, durability=Durability.DISK) == [STORED] * 3
            found = await cache.lookup(chain(blocks))
            first.kill()
            while cache.attached or strict.attached:
                await asyncio.sleep(0.001)
            async with asyncio.timeout(10):  # a call's own deadline would be longer
                assert (await cache.lookup(chain(blocks), timeout_s=60)).reachable is False
                assert (await cache.get(found.lease, chain(blocks), into=buffers(3))).misses == dict.fromkeys(
                    range(3), BlockMissReason.STORE_UNAVAILABLE
                )
                assert await cache.put(make(1)) == [PutOutcome(PutStatus.REFUSED, PutRefusal.STORE_UNAVAILABLE)]
                await cache.release(found.lease, timeout_s=60)
                assert (await cache.prefetch(chain(blocks), timeout_s=60)).blocks == 0
            with pytest.raises(UnavailableError):
                await strict.lookup(chain(blocks))
            with ServiceProcess(tmp_path, listen=f"127.0.0.1:{port}"):
                while not cache.attached:
                    await asyncio.sleep(0.01)
                assert cache.boot_epoch != epoch
                again = await cache.lookup(chain(blocks))
                assert [(run.tier, run.blocks) for run in again.runs] == [(Tier.DISK, 3)]
                assert again.runs[0].eta_s > 0
                into = buffers(3)
                result = await cache.get(again.lease, chain(blocks), into=into)
                assert [bytes(buffer) for buffer in into] == [block.payload for block in blocks]
                assert [(time.tier, time.blocks) for time in result.times] == [(Tier.DISK, 3)]

    run(scenario)


def test_death_in_mid_get_ends_the_call(tmp_path: Path) -> None:
    async def scenario() -> None:
        victim = ServiceProcess(tmp_path, fault_delays="get:5000").start()
        async with CacheClient(victim.address, degrade=True) as cache:
            await cache.attach(identity(), LAYOUT)
            blocks = make(2)
            await cache.put(blocks)
            reading = asyncio.create_task(cache.get(0, chain(blocks), into=buffers(2)))
            await asyncio.sleep(0.1)
            victim.kill()
            async with asyncio.timeout(10):  # its deadline is 30 s away
                assert (await reading).found == (False, False)

    run(scenario)


def test_closing_ends_calls_with_an_error_and_cancelling_cancels() -> None:
    async def scenario() -> None:
        with ServiceProcess(fault_delays="get:5000,lookup:5000") as slow:
            for degrade in (False, True):
                cache = CacheClient(slow.address, degrade=degrade)
                await cache.attach(identity(), LAYOUT)
                reading = asyncio.create_task(cache.get(0, os.urandom(32), into=buffers(1)))
                cancelled = asyncio.create_task(cache.lookup(os.urandom(32), timeout_s=5))
                await asyncio.sleep(0.1)
                cancelled.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await cancelled
                await cache.close()
                if degrade:
                    assert (await reading).found == (False,)
                else:
                    with pytest.raises(UnavailableError):
                        await reading

    run(scenario)


def test_a_hanging_service_costs_bounded_time() -> None:
    async def scenario() -> None:
        with ServiceProcess() as hanging:
            async with CacheClient(hanging.address) as cache:
                await cache.attach(identity(), LAYOUT)
                os.kill(hanging.process.pid, signal.SIGSTOP)
                for _ in range(3):
                    with pytest.raises(DeadlineExceededError):
                        await cache.lookup(os.urandom(32), timeout_s=0.05)
                async with asyncio.timeout(10):
                    with pytest.raises(UnavailableError, match="does not answer"):
                        await cache.lookup(os.urandom(32), timeout_s=60)
                os.kill(hanging.process.pid, signal.SIGCONT)
                while not cache.attached:
                    await asyncio.sleep(0.05)
                assert (await cache.lookup(os.urandom(32))).blocks == 0

    run(scenario)


def test_attaching_before_the_service_is_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        address = f"unix:{tmp_path}/cache.sock"
        async with CacheClient(address, degrade=True) as cache, CacheClient(address) as strict:
            assert not await cache.attach(identity(), LAYOUT, timeout_s=0.1)
            with pytest.raises(UnavailableError):
                await strict.attach(identity(), LAYOUT, timeout_s=0.1)
            with ServiceProcess(listen=address):
                while not (cache.attached and strict.attached):
                    await asyncio.sleep(0.01)
                assert await cache.put(make(1)) == [STORED]

    run(scenario)
