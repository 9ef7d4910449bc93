"""The connector against a cache client that does what a script says: every ticket ends, no slot is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_cache import GetResult, LookupResult, PutBlock, PutOutcome, PutStatus, TierRun
from katydid_cache import Tier as CacheTier
from katydid_engine.engine_metrics import EngineMetrics
from katydid_engine.faults import FaultDelays
from katydid_engine.kv_connector import KvConnector
from katydid_engine.messages import (
    KvArrived,
    KvCancel,
    KvFound,
    KvLookup,
    KvReadSlotsFree,
    KvStore,
    KvWriteSlotsFree,
    SetKv,
    ToWorker,
)
from katydid_engine.phase_spans import CacheSpans
from katydid_engine.request import Tier, fetch_span_id
from katydid_engine.staging import Staging, StagingShape
from katydid_runtime.block_hash import RUN_BLOCKS
from katydid_runtime.trace_context import TraceContext

SLOT_BYTES = 16
READ_SLOTS = 3


def name(block: int) -> bytes:
    return bytes([block]) * 32


class ScriptedCache:
    """Holds block ``i`` as 16 bytes of ``i``; ``missing`` blocks vanish between lookup and read."""

    def __init__(
        self,
        held: int,
        missing: frozenset[int] = frozenset(),
        broken: frozenset[str] = frozenset(),
        disk_eta_s: float = 0.0,
    ) -> None:
        self.disk_eta_s = disk_eta_s
        self.attached = True
        self.arena = None
        self.in_place = None
        self.held = held
        self.missing = missing
        self.broken = broken
        self.released: list[int] = []
        self.stored: dict[bytes, bytes] = {}
        self.tenants: list[tuple[bytes, float | None]] = []
        self.traces: list[TraceContext | None] = []
        self.befores: list[bytes] = []
        self.lookups: list[tuple[int, TraceContext | None]] = []
        self.runs: list[bytes] = []

    async def lookup(self, hashes: bytes, *, before: bytes, trace: TraceContext | None) -> LookupResult:
        self.befores.append(before)
        self.lookups.append((len(hashes) // 32, trace))
        self.traces.append(trace)
        await asyncio.sleep(0)
        if "lookup" in self.broken:
            raise RuntimeError("lookup")
        blocks = min(self.held, len(hashes) // 32)
        memory = blocks // 2
        runs = (TierRun(CacheTier.MEMORY, memory, 0.0), TierRun(CacheTier.DISK, blocks - memory, self.disk_eta_s))
        return LookupResult(blocks, runs, lease=7 if blocks else 0)

    async def get(
        self,
        lease: int,
        hashes: bytes,
        *,
        into: Sequence[memoryview],
        trace: TraceContext | None,
        timeout_s: float,
    ) -> GetResult:
        assert (lease, timeout_s) == (7, 5.0)
        self.traces.append(trace)
        await asyncio.sleep(0)
        if "get" in self.broken:
            raise RuntimeError("get")
        blocks = list(hashes[::32])
        for block, buffer in zip(blocks, into, strict=True):
            buffer[:] = bytes([block]) * SLOT_BYTES
        return GetResult(tuple(block not in self.missing for block in blocks))

    async def put(self, blocks: Sequence[PutBlock], *, tenant: bytes, hold_s: float | None) -> list[PutOutcome]:
        await asyncio.sleep(0)
        if "put" in self.broken:
            raise RuntimeError("put")
        self.tenants.append((tenant, hold_s))
        self.runs += [block.run for block in blocks]
        self.stored.update((block.hash, bytes(block.payload)) for block in blocks)
        return [PutOutcome(PutStatus.STORED) for _ in blocks]

    async def release(self, lease: int) -> None:
        self.released.append(lease)


class Worker:
    """The other side: frees read slots a moment after they arrive."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self.messages: list[ToWorker] = []
        self.read: dict[int, list[bytes]] = {}
        self.ended: set[int] = set()
        self.connector: KvConnector | None = None

    def take(self, message: ToWorker) -> None:
        self.messages.append(message)
        if isinstance(message, KvFound) and not message.runs and not message.more:
            self.ended.add(message.ticket)
        if isinstance(message, KvArrived):
            self.read.setdefault(message.ticket, []).extend(bytes(self.staging.slot(slot)) for slot in message.slots)
            if message.last:
                assert message.ticket not in self.ended
                self.ended.add(message.ticket)
            if message.slots:
                asyncio.get_running_loop().call_soon(self.ask, KvReadSlotsFree(message.slots))

    def ask(self, ask: KvReadSlotsFree) -> None:
        assert self.connector is not None
        self.connector.ask(ask)


def drive(
    cache: ScriptedCache,
    scenario: Callable[[KvConnector, Worker], Awaitable[None]],
    prefill_speed: Callable[[], float] = lambda: 0.0,
) -> Worker:
    async def body() -> Worker:
        staging = Staging.create(StagingShape(SLOT_BYTES, 4, READ_SLOTS))
        worker = Worker(staging)
        parts = (staging, worker.take, EngineMetrics(), FaultDelays(), prefill_speed)
        connector = KvConnector(cache, *parts)  # type: ignore[arg-type]
        worker.connector = connector
        running = asyncio.create_task(connector.run())
        await asyncio.wait_for(scenario(connector, worker), 10)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return worker

    return asyncio.run(body())


@settings(max_examples=50, deadline=None)
@given(
    tickets=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    held=st.integers(0, 12),
    missing=st.frozensets(st.integers(0, 11), max_size=2),
    broken=st.frozensets(st.sampled_from(["lookup", "get"]), max_size=1),
)
def test_every_ticket_ends_and_no_slot_is_lost(
    tickets: list[int], held: int, missing: frozenset[int], broken: frozenset[str]
) -> None:
    cache = ScriptedCache(held, missing, broken)

    async def scenario(connector: KvConnector, worker: Worker) -> None:
        for ticket, blocks in enumerate(tickets):
            connector.ask(KvLookup(ticket, ticket, b"".join(name(block) for block in range(blocks))))
        while len(worker.ended) < len(tickets):
            await asyncio.sleep(0.001)
        # All read slots are free again: a fetch of one tier as large as all of them together goes through.
        cache.held, cache.missing, cache.broken = 2 * READ_SLOTS, frozenset(), frozenset()
        connector.ask(KvLookup(99, 99, b"".join(name(block) for block in range(2 * READ_SLOTS))))
        while 99 not in worker.ended:
            await asyncio.sleep(0.001)
        arrivals = [m for m in worker.messages if isinstance(m, KvArrived) and m.ticket == 99]
        assert max(len(arrival.slots) for arrival in arrivals) == READ_SLOTS

    worker = drive(cache, scenario)
    for ticket, blocks in enumerate(tickets):
        found = min(held, blocks)
        usable = min([found, *(block for block in missing if block < found)])
        expected = [] if broken else [bytes([block]) * SLOT_BYTES for block in range(usable)]
        assert worker.read.get(ticket, []) == expected


def test_tiers_are_told_in_order_and_the_lease_is_given_back() -> None:
    cache = ScriptedCache(held=5)

    async def scenario(connector: KvConnector, worker: Worker) -> None:
        connector.ask(KvLookup(1, 1, b"".join(name(block) for block in range(9))))
        while not cache.released:
            await asyncio.sleep(0.001)

    worker = drive(cache, scenario)
    assert worker.messages[:2] == [SetKv(True), KvFound(1, ((Tier.MEMORY, 2), (Tier.DISK, 3)))]
    assert cache.released == [7]


def test_what_is_cheaper_to_compute_is_not_fetched_and_the_span_says_so() -> None:
    cache = ScriptedCache(held=8, disk_eta_s=1.0)
    spans = CacheSpans()

    async def scenario(connector: KvConnector, worker: Worker) -> None:
        hashes = b"".join(name(block) for block in range(8))
        connector.ask(KvLookup(1, 1, hashes, b"", b"before"), spans)
        while not cache.released:
            await asyncio.sleep(0.001)

    worker = drive(cache, scenario, lambda: 64_000.0)
    # Four blocks on disk would take a second, to compute them takes four milliseconds.
    assert worker.messages[1] == KvFound(1, ((Tier.MEMORY, 4),))
    assert len(worker.read[1]) == 4
    assert spans.attributes["kvcache.blocks.found"] == 8
    assert spans.attributes["kvcache.blocks.advised"] == 4
    assert cache.befores == [b"before"]
    assert drive(ScriptedCache(8, disk_eta_s=1.0), scenario_all).messages[1].runs[1] == (Tier.DISK, 4)  # type: ignore[union-attr]


async def scenario_all(connector: KvConnector, worker: Worker) -> None:
    connector.ask(KvLookup(1, 1, b"".join(name(block) for block in range(8))))
    while 1 not in worker.ended:
        await asyncio.sleep(0.001)


def test_every_call_is_traced_under_its_own_phase() -> None:
    cache = ScriptedCache(held=9)
    parent, lookup_id = TraceContext("1" * 32, "2" * 16), b"12345678"

    async def scenario(connector: KvConnector, worker: Worker) -> None:
        for ticket, spans in enumerate((CacheSpans(parent, lookup_id), CacheSpans(parent))):
            connector.ask(KvLookup(ticket, ticket, b"".join(name(block) for block in range(9)), lookup_id), spans)
            while len(cache.released) <= ticket:
                await asyncio.sleep(0.001)

    drive(cache, scenario)
    memory, disk = (parent.span(fetch_span_id(lookup_id, block)) for block in (0, 4))
    # Four blocks of one tier, then five of the other; no window holds blocks of both.
    assert [trace for trace, _ in groupby(cache.traces)] == [parent.span(lookup_id), memory, disk, parent]


def test_a_cancelled_ticket_gives_its_slots_back() -> None:
    cache = ScriptedCache(held=3)

    async def scenario(connector: KvConnector, worker: Worker) -> None:
        connector.ask(KvLookup(1, 1, b"".join(name(block) for block in range(3))))
        await asyncio.sleep(0)
        connector.ask(KvCancel(1))
        await asyncio.sleep(0.01)
        connector.ask(KvLookup(2, 2, b"".join(name(block) for block in range(3))))
        while 2 not in worker.ended:
            await asyncio.sleep(0.001)

    assert len(drive(cache, scenario).read[2]) == 3


def test_blocks_that_another_engine_computes_are_read_as_they_come() -> None:
    cache = ScriptedCache(held=0, disk_eta_s=1.0)
    seen = []

    async def scenario(connector: KvConnector, worker: Worker) -> None:
        hashes = b"".join(name(block) for block in range(11))
        connector.ask(KvLookup(1, 1, hashes, before=name(99), coming_s=9.0))
        for there in (0, 3, 3, 10):
            # What is looked up is what is missing still.
            cache.held = max(0, there - len(worker.read.get(1, [])))
            while len(worker.read.get(1, [])) < there or len(cache.befores) == 0:
                await asyncio.sleep(0.001)
            cache.held = 0
            seen.append(1 in worker.ended)
        cache.held = 1
        while 1 not in worker.ended:
            await asyncio.sleep(0.001)
        while len(cache.released) < 3:
            await asyncio.sleep(0.001)

    # It is cheaper to compute them, but they are fetched all the same.
    worker = drive(cache, scenario, lambda: 1e6)
    assert seen == [False] * 4
    assert worker.read[1] == [bytes([block]) * SLOT_BYTES for block in range(11)]
    found = [message for message in worker.messages if isinstance(message, KvFound)]
    assert [message.more for message in found] == [True, True, True, False]
    # Blocks 1 to 11 of a chain lie in one run: those before the first that is asked for are named.
    assert cache.befores[0] == name(99)
    assert cache.befores[-1] == b"".join(map(name, (99, *range(10))))


def test_behind_a_whole_run_nothing_is_named() -> None:
    cache = ScriptedCache(held=RUN_BLOCKS - 1)

    async def scenario(connector: KvConnector, worker: Worker) -> None:
        hashes = b"".join(name(block) for block in range(RUN_BLOCKS + 1))
        connector.ask(KvLookup(1, 1, hashes, before=name(99), coming_s=9.0))
        while len(worker.read.get(1, [])) < RUN_BLOCKS - 1:
            await asyncio.sleep(0.001)
        while 1 not in worker.ended:
            await asyncio.sleep(0.001)

    drive(cache, scenario)
    assert cache.befores == [name(99), b""]


def test_a_long_chain_is_asked_for_in_parts_and_ever_more_seldom() -> None:
    cache = ScriptedCache(held=0)
    parent = TraceContext("1" * 32, "2" * 16)

    async def scenario(connector: KvConnector, worker: Worker) -> None:
        hashes = b"".join(name(block % 256) for block in range(600))
        connector.ask(KvLookup(1, 1, hashes, coming_s=9.0), CacheSpans(parent))
        await asyncio.sleep(0.4)
        cache.held = 600
        while 1 not in worker.ended:
            await asyncio.sleep(0.001)

    worker = drive(cache, scenario)
    assert len(worker.read[1]) == 600
    *empty, second, third = cache.lookups
    assert (second, third) == ((256, None), (88, None))
    assert empty == [(256, parent), *[(256, None)] * (len(empty) - 1)]
    # At 30 ms, 45, 68, 101 and 152; every 30 ms there would be twelve.
    assert len(empty) < 10


def test_blocks_that_do_not_come_are_not_waited_for_longer_than_was_asked() -> None:
    for coming_s, held in ((0.05, 0), (0.05, 2)):
        cache = ScriptedCache(held=held)

        async def scenario(connector: KvConnector, worker: Worker) -> None:
            connector.ask(KvLookup(1, 1, b"".join(map(name, range(9))), coming_s=coming_s))  # noqa: B023
            while 1 not in worker.read and held:  # noqa: B023
                await asyncio.sleep(0.001)
            cache.held = 0  # noqa: B023
            while 1 not in worker.ended:
                await asyncio.sleep(0.001)

        assert len(drive(cache, scenario).read.get(1, [])) == held


def test_blocks_are_written_by_tenant_and_their_slots_come_back() -> None:
    cache = ScriptedCache(held=0)

    async def scenario(connector: KvConnector, worker: Worker) -> None:
        for slot, tenant in enumerate([b"a", b"b", b"a"]):
            worker.staging.slot(slot)[:] = bytes([slot]) * SLOT_BYTES
            connector.ask(KvStore(slot, name(slot), b"", tenant, None, b"run"))
        while len(cache.stored) < 3:
            await asyncio.sleep(0.001)
        cache.broken = frozenset({"put"})
        connector.ask(KvStore(3, name(3), b"", b"a", 5.0))
        while not any(isinstance(m, KvWriteSlotsFree) and 3 in m.slots for m in worker.messages):
            await asyncio.sleep(0.001)

    worker = drive(cache, scenario)
    assert cache.stored == {name(slot): bytes([slot]) * SLOT_BYTES for slot in range(3)}
    assert cache.runs == [b"run"] * 3
    assert sorted(cache.tenants) == [(b"a", None), (b"b", None)]
    freed = [slot for message in worker.messages if isinstance(message, KvWriteSlotsFree) for slot in message.slots]
    assert sorted(freed) == [0, 1, 2, 3]


def test_the_worker_hears_when_the_service_comes_and_goes() -> None:
    cache = ScriptedCache(held=0)

    async def scenario(connector: KvConnector, worker: Worker) -> None:
        for attached in (False, True):
            await asyncio.sleep(0.01)
            cache.attached = attached
            while connector.attached is not attached:
                await asyncio.sleep(0.01)

    assert drive(cache, scenario).messages == [SetKv(True), SetKv(False), SetKv(True)]
