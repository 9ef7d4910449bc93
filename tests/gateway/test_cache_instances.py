"""All instances of the cache service are followed, those that join and leave included."""

from __future__ import annotations

import asyncio
from pathlib import Path

import katydid_cache.instances
import pytest
from katydid.kvcache.v1 import kvcache_pb2
from katydid.kvcache.v1.kvcache_pb2_grpc import add_KvCacheServiceServicer_to_server
from katydid_gateway.engines import block_events, cache_instances
from katydid_gateway.engines.cache_instances import CacheInstances
from katydid_gateway.routing.tier_index import CacheTier, TierIndex, TierRun
from katydid_runtime.server import RpcServer

from tests.gateway.rig import until
from tests.gateway.test_block_events import BLOCKS, Cache


def holding(*blocks: bytes) -> Cache:
    """An instance that has these blocks in memory."""
    held = kvcache_pb2.BlockSnapshot(tier=kvcache_pb2.TIER_MEMORY, hashes=b"".join(blocks), last=True)
    return Cache([kvcache_pb2.WatchResponse(sequence=1, snapshot=held)])


def test_every_instance_is_followed_and_those_that_leave_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_instances, "LOOK_S", 0.05)
    monkeypatch.setattr(block_events, "RETRY_S", 0.05)
    monkeypatch.setattr(katydid_cache.instances, "_LOOK_S", 0.05)
    named = tmp_path / "instances"

    async def body() -> None:
        servers, addresses = [], []
        for cache in (holding(*BLOCKS[:4]), holding(*BLOCKS[2:])):
            server = RpcServer("127.0.0.1:0", services=[])
            add_KvCacheServiceServicer_to_server(cache, server.grpc)
            addresses.append(await server.start())
            servers.append(server)
        tiers = TierIndex()
        named.write_text(addresses[0])
        following = CacheInstances(f"file:{named}", tiers, tls=None, token=None)
        task = asyncio.create_task(following.follow(b"i" * 32))
        try:
            await until(lambda: tiers.runs(BLOCKS, 0) == [TierRun(CacheTier.MEMORY, 4)])
            named.write_text("\n".join(addresses))
            await until(lambda: tiers.runs(BLOCKS, 0) == [TierRun(CacheTier.MEMORY, 6)])
            near = [TierRun(CacheTier.MEMORY, 4), TierRun(CacheTier.SHARED, 2)]
            assert tiers.runs(BLOCKS, 0, near=addresses[0]) == near
            named.write_text(addresses[1])
            await until(lambda: tiers.runs(BLOCKS, 0) == [])
            assert tiers.runs(BLOCKS, 2) == [TierRun(CacheTier.MEMORY, 4)]
            assert following.watched == {addresses[1]}
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for server in servers:
                await server.grpc.stop(0)
        assert len(tiers) == 0

    asyncio.run(body())
