"""Blocks in the cache service's own memory: reserved, packed, committed and read through numbers of slots alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence

import pytest
import torch
from katydid_cache import (
    NOT_WRITTEN,
    ArenaMapping,
)
from katydid_engine.arena_reads import ArenaReads
from katydid_engine.arena_writes import ArenaWrites
from katydid_engine.engine_metrics import EngineMetrics
from katydid_engine.faults import FaultDelays
from katydid_engine.kv_connector import KvConnector
from katydid_engine.kv_traffic import KvTraffic
from katydid_engine.messages import (
    KvArrived,
    KvCancel,
    KvGiveUp,
    KvGranted,
    KvLookup,
    KvReadSlotsFree,
    KvReserve,
    KvStore,
    ToWorker,
)
from katydid_engine.plan import Transfer
from katydid_engine.slot_memory import SlotMemory
from katydid_engine.staging import ARENA_PAGE_BYTES, Staging, StagingShape, arena_place, arena_slot
from katydid_kernels import linear_checksum

from tests.engine.shared_memory import BLOCK, SLOT_BYTES, SharedMemory, name, summed


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


def hashes(blocks: Sequence[int]) -> bytes:
    return b"".join(map(name, blocks))


def writing(memory: SharedMemory) -> tuple[ArenaWrites, list[KvGranted], EngineMetrics]:
    sent: list[KvGranted] = []
    metrics = EngineMetrics()

    def send(message: ToWorker) -> None:
        assert isinstance(message, KvGranted)
        sent.append(message)

    return ArenaWrites(memory, send, metrics), sent, metrics  # type: ignore[arg-type]


def stored(metrics: EngineMetrics) -> dict[str, float]:
    return {
        sample.labels["outcome"]: sample.value
        for family in metrics.kv_stored.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def test_blocks_are_granted_packed_and_committed_once() -> None:
    async def scenario() -> None:
        memory = SharedMemory()
        memory.committed[name(2)] = b"there already"
        writes, sent, metrics = writing(memory)
        running = asyncio.create_task(writes.run())
        for block in (1, 2, 3):
            writes.reserve(KvReserve(name(block), b"", b"tenant", None))
        while not sent:
            await asyncio.sleep(0.001)
        (granted,) = sent
        assert memory.arena is not None
        one, two, three = granted.slots
        assert granted.hashes == (name(1), name(2), name(3))
        assert two is None
        assert one == arena_slot(memory.arena.descriptor, SLOT_BYTES)
        assert three is not None
        memory.write(1)
        writes.settle(one, linear_checksum(memory.content(1)))
        await asyncio.sleep(0.01)
        assert name(1) not in memory.committed, "a reservation is committed as a whole"
        writes.settle(three, NOT_WRITTEN)
        while name(1) not in memory.committed:
            await asyncio.sleep(0.001)
        assert memory.given_up == 1
        assert name(3) not in memory.committed
        async with asyncio.timeout(20):
            while stored(metrics) != {"stored": 1.0, "present": 1.0}:
                await asyncio.sleep(0.001)
        running.cancel()

    run(scenario)


@pytest.mark.parametrize("trouble", ["broken", "no memory", "restart"])
def test_every_wish_is_answered(trouble: str) -> None:
    async def scenario() -> None:
        memory = SharedMemory()
        writes, sent, _ = writing(memory)
        memory.broken = trouble == "broken"
        if trouble == "no memory":
            memory.arena = None
        running = asyncio.create_task(writes.run())
        writes.reserve(KvReserve(name(1), b"", b"", None))
        if trouble == "restart":
            await asyncio.sleep(0)
            memory.restart()
        while not sent:
            await asyncio.sleep(0.001)
        assert sent[0].slots == (None,)
        running.cancel()

    run(scenario)


def test_reads_are_checked_counted_and_limited() -> None:
    async def scenario() -> None:
        memory = SharedMemory()
        for block in range(8):
            memory.write(block)
        memory.on_disk = {6, 7}
        reads = ArenaReads(memory, BLOCK, limit=4)  # type: ignore[arg-type]
        lying = reads.found(memory.found(8))
        assert lying is not None
        first = (await reads.window(1, lying, hashes(range(4)), 5.0)).slots
        assert memory.arena is not None
        assert first == tuple(arena_slot(memory.arena.descriptor, block * SLOT_BYTES) for block in range(4))
        second = asyncio.create_task(reads.window(1, lying, hashes(range(4, 8)), 5.0))
        await asyncio.sleep(0.02)
        assert not second.done(), "four blocks at a time"
        assert reads.unpacked([3, *first[:2], 4]) == [3, 4], "slots of the staging buffer are not its own"
        await asyncio.sleep(0.02)
        assert not second.done()
        reads.unpacked(first[2:])
        slots = (await second).slots
        assert len(slots) == 4, "those on disk were brought up"
        ended = asyncio.create_task(reads.all_unpacked(1))
        reads.unpacked(slots[:3])
        await asyncio.sleep(0.01)
        assert not ended.done()
        reads.unpacked(slots[3:])
        await ended

    run(scenario)


def test_wrong_bytes_and_a_restarted_service_end_the_read() -> None:
    async def scenario() -> None:
        memory = SharedMemory()
        for block in range(4):
            memory.write(block)
        assert memory.arena is not None
        memory.arena.view[2 * SLOT_BYTES + 9] ^= 1
        reads = ArenaReads(memory, BLOCK, limit=8)  # type: ignore[arg-type]
        lying = reads.found(memory.found(4))
        assert lying is not None
        slots = (await reads.window(1, lying, hashes(range(4)), 5.0)).slots
        assert len(slots) == 2
        assert memory.reported == [name(2)]
        reads.unpacked(slots)
        lying = reads.found(memory.found(2))
        assert lying is not None
        memory.restart()
        assert not (await reads.window(2, lying, hashes(range(2)), 5.0)).slots
        await reads.all_unpacked(2)

    run(scenario)


def test_blocks_with_a_linear_checksum_are_left_to_the_worker_to_check() -> None:
    async def scenario() -> None:
        memory = SharedMemory()
        memory.summed = {0, 2}
        for block in range(3):
            memory.write(block)
        assert memory.arena is not None
        memory.arena.view[9] ^= 1
        reads = ArenaReads(memory, BLOCK, limit=8)  # type: ignore[arg-type]
        lying = reads.found(memory.found(3))
        assert lying is not None
        window = await reads.window(1, lying, hashes(range(3)), 5.0)
        assert len(window.slots) == 3
        assert window.checksums == (summed(0), 0, summed(2))
        assert memory.reported == []

    run(scenario)


def test_what_lies_ready_is_told_at_once_and_its_memory_kept() -> None:
    """Up to the limit; blocks that are to be checked or brought up first come in windows. The descriptor that slots
    name is closed when all of them are unpacked, not before."""

    async def scenario() -> None:
        memory = SharedMemory()
        memory.summed = set(range(6))
        for block in range(8):
            memory.write(block)
        reads = ArenaReads(memory, BLOCK, limit=5)  # type: ignore[arg-type]
        lying = reads.found(memory.found(8))
        assert lying is not None
        assert memory.arena is not None
        descriptor = memory.arena.descriptor
        assert [reads.reach(lying, most) for most in (8, 3)] == [5, 3]
        window = await reads.window(1, lying, hashes(range(5)), 5.0)
        assert reads.reach(lying, 3) == 3
        memory.restart()
        del lying
        os.fstat(descriptor)
        reads.unpacked(window.slots)
        await reads.all_unpacked(1)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)

    run(scenario)


def test_a_fetch_that_is_cancelled_keeps_its_lease_until_workers_are_done() -> None:
    async def scenario() -> None:
        memory, sent = SharedMemory(), list[ToWorker]()
        memory.summed = set(range(4))
        staging = Staging.create(StagingShape(BLOCK, 2, 4))
        connector = KvConnector(memory, staging, sent.append, EngineMetrics(), FaultDelays())  # type: ignore[arg-type]
        connector.ask(KvLookup(1, 1, hashes(range(4)), b"", b"", b""))
        while not any(isinstance(message, KvArrived) for message in sent):
            await asyncio.sleep(0.001)
        (slots,) = (message.slots for message in sent if isinstance(message, KvArrived))
        connector.ask(KvCancel(1))
        await asyncio.sleep(0.01)
        assert len(slots) == 4
        assert memory.released == []
        connector.ask(KvReadSlotsFree(slots))
        while not memory.released:
            await asyncio.sleep(0.001)

    run(scenario)


@pytest.fixture
def arenas() -> list[ArenaMapping]:
    mappings = [SharedMemory._map() for _ in range(2)]
    for number, mapping in enumerate(mappings, 1):
        for block in range(10):
            mapping.view[block * SLOT_BYTES : block * SLOT_BYTES + BLOCK] = bytes([10 * number + block]) * BLOCK
    return mappings


def test_a_rank_finds_slots_in_the_buffer_and_in_whichever_memory(arenas: list[ArenaMapping]) -> None:
    staging = torch.arange(3, dtype=torch.uint8).repeat_interleave(BLOCK).view(3, BLOCK)
    memory = SlotMemory(staging, torch.device("cpu"), face=os.getpid())
    for number, arena in enumerate(arenas, 1):
        slots = [1, arena_slot(arena.descriptor, 0), arena_slot(arena.descriptor, 9 * SLOT_BYTES), 2]
        assert [arena_place(slot) is not None for slot in slots] == [False, True, True, False]
        seen: dict[int, int] = {}
        for objects, places in memory.groups([Transfer(page, slot) for page, slot in enumerate(slots)]):
            assert objects.shape[1] == BLOCK
            for place in places:
                row = memory.row(slots[place])
                (value,) = set(objects[row].tolist())
                seen[place] = value
                if value >= 10:
                    assert objects.stride(0) == ARENA_PAGE_BYTES
                    objects[row] = 200
        assert seen == {0: 1, 1: 10 * number, 2: 10 * number + 9, 3: 2}
        assert set(arena.view[:BLOCK]) == {200}, "the same memory, not a copy"


class Live:
    """Stands for a request."""

    tenant = b"t"
    hold_s = None


def test_a_step_packs_what_was_granted_and_gives_up_what_has_gone() -> None:
    traffic = KvTraffic(range(2))
    traffic.set_attached(True, in_place=True)
    chain = [name(block) for block in range(5)]
    for block in range(5):
        traffic.offer(Live(), chain, block, page=100 + block)  # type: ignore[arg-type]
    traffic.offer(Live(), chain, 4, page=200)  # type: ignore[arg-type]
    asks = traffic.take_asks()
    assert [ask.hash for ask in asks if isinstance(ask, KvReserve)] == chain, "a block is wanted once"
    assert traffic.take_packs(lambda page: chain[page - 100]) == ()
    big = arena_slot(7, 0)
    traffic.granted(KvGranted(tuple(chain[:4]), (big, None, big + 1, big + 2)))
    gone = {103}
    packs = traffic.take_packs(lambda page: None if page in gone else chain[page - 100])
    assert [transfer for transfer, _ in packs] == [Transfer(100, big, summed=True), Transfer(102, big + 1, summed=True)]
    assert [store for _, store in packs] == [
        KvStore(big, chain[0], b"", b"t", None, chain[0]),
        KvStore(big + 1, chain[2], chain[1], b"t", None, chain[0]),
    ]
    assert traffic.take_asks() == (KvGiveUp((big + 2,)),)
    traffic.granted(KvGranted((chain[4],), (big + 3,)))
    traffic.set_attached(False)
    assert traffic.take_asks() == (KvGiveUp((big + 3,)),), "whatever was granted is answered"
    assert traffic.take_packs(lambda page: chain[page - 100]) == ()
    traffic.set_attached(True)
    traffic.offer(Live(), chain, 0, page=100)  # type: ignore[arg-type]
    ((transfer, _),) = traffic.take_packs(lambda page: chain[page - 100])
    assert transfer.slot in range(2), "without the service's memory blocks go through the buffer"
    assert not transfer.summed
