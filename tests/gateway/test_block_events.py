"""Event streams into the indexes: snapshot, deltas, gaps, restarts, and services that have no such stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from katydid.engine.v1 import engine_pb2
from katydid.engine.v1.engine_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server
from katydid.kvcache.v1 import kvcache_pb2
from katydid.kvcache.v1.kvcache_pb2_grpc import KvCacheServiceServicer, add_KvCacheServiceServicer_to_server
from katydid_gateway.engines import block_events
from katydid_gateway.engines.block_events import follow_cache, follow_engine
from katydid_gateway.routing.prefix_index import Holder, PrefixIndex
from katydid_gateway.routing.tier_index import CacheTier, TierIndex, TierRun
from katydid_runtime.errors import UnsupportedError
from katydid_runtime.server import RpcServer

from tests.gateway.rig import until

BLOCKS = [bytes([number]) * 32 for number in range(6)]


class Engine(EngineServiceServicer):
    """Plays one list of events a stream, then waits."""

    def __init__(self, *streams: list[engine_pb2.WatchResponse]) -> None:
        self.streams = list(streams)

    async def Watch(self, _request: Any, _context: Any) -> AsyncIterator[engine_pb2.WatchResponse]:
        for event in self.streams.pop(0) if self.streams else []:
            yield event
        if not self.streams:
            await asyncio.Event().wait()


class Cache(KvCacheServiceServicer):
    def __init__(self, *streams: list[kvcache_pb2.WatchResponse]) -> None:
        self.streams = list(streams)
        self.identities: list[bytes] = []

    async def Watch(self, request: Any, _context: Any) -> AsyncIterator[kvcache_pb2.WatchResponse]:
        self.identities.append(request.identity)
        for event in self.streams.pop(0) if self.streams else []:
            yield event
        if not self.streams:
            await asyncio.Event().wait()


def snapshot(sequence: int, *blocks: bytes, rank: int = 0) -> engine_pb2.WatchResponse:
    part = engine_pb2.BlockSnapshot(dp_rank=rank, hashes=b"".join(blocks))
    return engine_pb2.WatchResponse(sequence=sequence, snapshot=part)


def delta(sequence: int, **fields: Any) -> engine_pb2.WatchResponse:
    return engine_pb2.WatchResponse(sequence=sequence, delta=engine_pb2.BlockDelta(**fields))


def watch(engine: EngineServiceServicer, check: Any, ranks: int = 1) -> None:
    async def body() -> None:
        server = RpcServer("127.0.0.1:0", services=[])
        add_EngineServiceServicer_to_server(engine, server.grpc)
        address = await server.start()
        index = PrefixIndex()
        async with grpc.aio.insecure_channel(address) as channel:
            task = asyncio.create_task(follow_engine("e", ranks, channel, index))
            try:
                await check(index, task)
                index.check_integrity()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await server.grpc.stop(0)

    asyncio.run(body())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_events, "RETRY_S", 0.02)


def test_snapshot_in_parts_then_deltas() -> None:
    events = [
        snapshot(1, *BLOCKS[:2]),
        snapshot(2, BLOCKS[2]),
        snapshot(3, BLOCKS[0], rank=1),
        delta(4, removed=BLOCKS[0], stored=BLOCKS[3] + BLOCKS[4]),
        delta(5, dp_rank=1, removed=BLOCKS[0], stored=BLOCKS[5]),
    ]

    async def check(index: PrefixIndex, _task: Any) -> None:
        await until(lambda: index.blocks(Holder("e", 0)) == 4 and index.blocks(Holder("e", 1)) == 1)
        assert index.depths(BLOCKS[5:], 0.0) == {Holder("e", 0): 0, Holder("e", 1): 1}

    watch(Engine(events), check, ranks=2)


def test_a_gap_means_starting_over() -> None:
    async def check(index: PrefixIndex, _task: Any) -> None:
        await until(lambda: index.blocks(Holder("e", 0)) == 1)
        assert index.depths([BLOCKS[5]], 0.0)[Holder("e", 0)] == 1

    watch(Engine([snapshot(1, *BLOCKS[:3]), delta(3, stored=BLOCKS[4])], [snapshot(1, BLOCKS[5])]), check)


def test_an_engine_without_events_is_left_alone() -> None:
    class Silent(EngineServiceServicer):
        async def Watch(self, _request: Any, _context: Any) -> AsyncIterator[engine_pb2.WatchResponse]:
            raise UnsupportedError("no prefix cache here")
            yield

    async def check(_index: PrefixIndex, task: asyncio.Task[None]) -> None:
        await asyncio.wait_for(asyncio.shield(task), 5)

    watch(Silent(), check)


def test_the_cache_services_tiers_and_its_restart() -> None:
    first = [
        kvcache_pb2.WatchResponse(
            sequence=1, snapshot=kvcache_pb2.BlockSnapshot(tier=kvcache_pb2.TIER_DISK, hashes=b"".join(BLOCKS[:3]))
        ),
        kvcache_pb2.WatchResponse(
            sequence=2,
            delta=kvcache_pb2.BlockDelta(tier=kvcache_pb2.TIER_MEMORY, stored=BLOCKS[0], removed=BLOCKS[5]),
        ),
    ]
    second = [
        kvcache_pb2.WatchResponse(
            sequence=1, snapshot=kvcache_pb2.BlockSnapshot(tier=kvcache_pb2.TIER_SHARED, hashes=BLOCKS[4])
        )
    ]
    seen: list[list[TierRun]] = []

    class Recording(TierIndex):
        def cleared(self, instance: str) -> None:
            seen.append(self.runs(BLOCKS, 0))
            super().cleared(instance)

    async def body() -> None:
        server = RpcServer("127.0.0.1:0", services=[])
        cache = Cache(first, second)
        add_KvCacheServiceServicer_to_server(cache, server.grpc)
        address = await server.start()
        tiers = Recording()
        async with grpc.aio.insecure_channel(address) as channel:
            task = asyncio.create_task(follow_cache(b"i" * 32, "host-a", channel, tiers))
            await until(lambda: tiers.runs([BLOCKS[4]], 0) == [TierRun(CacheTier.SHARED, 1)])
            assert seen[0] == [TierRun(CacheTier.MEMORY, 1), TierRun(CacheTier.DISK, 2)]
            assert len(tiers) == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.grpc.stop(0)
        assert cache.identities == [b"i" * 32] * 2
        assert len(tiers) == 0

    asyncio.run(body())


def test_a_defect_in_one_event_means_starting_over(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, calls = PrefixIndex.stored, []

    def fail_once(self: PrefixIndex, holder: Holder, hashes: Any) -> None:
        calls.append(holder)
        if len(calls) == 1:
            raise RuntimeError("a defect")
        stored(self, holder, hashes)

    monkeypatch.setattr(PrefixIndex, "stored", fail_once)

    async def check(index: PrefixIndex, _task: Any) -> None:
        await until(lambda: index.blocks(Holder("e", 0)) == 1)

    watch(Engine([snapshot(1, *BLOCKS[:3])], [snapshot(1, BLOCKS[5])]), check)
