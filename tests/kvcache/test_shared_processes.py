"""Two service processes over one shared store, and what they do when it goes and comes back."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from katydid_cache import BlockMissReason, CacheClient, PutOutcome, PutStatus, Tier

from tests.kvcache.running import LAYOUT, ServiceProcess, chain, make, run
from tests.kvcache.stores import free_port, redis_server, s3_server

pytestmark = pytest.mark.e2e


def instance(folder: Path, url: str, **more: object) -> ServiceProcess:
    policy = folder / "policy.yaml"
    policy.write_text("tiers: {shared: {admission: all, ttl: 1h}}")
    settings = {"shared_url": url, "policy_file": policy, "shared_refresh_s": 0.1, "shared_timeout_s": 1.0}
    return ServiceProcess(**settings | more)


async def until_found(cache: CacheClient, hashes: bytes, blocks: int) -> None:
    deadline = time.monotonic() + 10
    while (await cache.lookup(hashes, lease=False)).blocks != blocks:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", ["s3", "redis"])
def test_blocks_outlive_the_instance_that_wrote_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        identity, blocks = os.urandom(32), make(5)
        with ExitStack() as stack:
            server = s3_server(tmp_path, monkeypatch) if kind == "s3" else redis_server()
            url, store = stack.enter_context(server)
            with instance(tmp_path, url) as one:
                async with CacheClient(one.address) as cache:
                    await cache.attach(identity, LAYOUT)
                    assert await cache.put(blocks) == [PutOutcome(PutStatus.STORED)] * 5
                assert one.stop() == 0, "what was on its way to the store is written before the end"
            with instance(tmp_path, url) as other:
                async with CacheClient(other.address) as cache:
                    await cache.attach(identity, LAYOUT)
                    await until_found(cache, chain(blocks), 5)
                    found = await cache.lookup(chain(blocks))
                    assert [(run.tier, run.blocks) for run in found.runs] == [(Tier.SHARED, 5)]
                    assert found.runs[0].eta_s > 0
                    into = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in blocks]
                    got = await cache.get(found.lease, chain(blocks[:3]), into=into[:3])
                    assert got.prefix == 3
                    assert [(of.tier, of.blocks) for of in got.times] == [(Tier.SHARED, 3)]
                    assert [bytes(buffer) for buffer in into[:3]] == [bytes(block.payload) for block in blocks[:3]]
                    store.kill()
                    store.wait(10)
                    started = time.monotonic()
                    missed = await cache.get(0, chain(blocks[3:]), into=into[3:])
                    assert missed.prefix == 0
                    assert set(missed.misses.values()) <= {
                        BlockMissReason.STORE_UNAVAILABLE,
                        BlockMissReason.ABSENT,
                    }
                    assert time.monotonic() - started < 15, "it waited for the store"
                    await until_found(cache, chain(blocks), 3)
                    for _ in range(20):
                        assert (await cache.lookup(chain(blocks), lease=False)).blocks == 3
                    more = make(3)
                    assert await cache.put(more) == [PutOutcome(PutStatus.STORED)] * 3
                    async with asyncio.timeout(20):
                        while (await cache.stats()).tiers[Tier.SHARED].sheds.get("failing", 0) < 3:
                            await asyncio.sleep(0.05)
                    stats = await cache.stats()
                    assert stats.tiers[Tier.SHARED].hits >= 5
                assert other.stop() == 0

    run(scenario)


def test_a_store_that_comes_back_is_used_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        port, blocks = free_port(), make(2)
        with instance(tmp_path, f"redis://127.0.0.1:{port}/0") as running:
            async with CacheClient(running.address) as cache:
                await cache.attach(os.urandom(32), LAYOUT)
                await cache.put(make(2))
                await asyncio.sleep(0.5)
                with redis_server(port):
                    deadline = time.monotonic() + 20
                    while (await cache.stats()).tiers[Tier.SHARED].writes < 1:
                        assert time.monotonic() < deadline, (await cache.stats()).tiers[Tier.SHARED]
                        await cache.put(blocks)
                        await asyncio.sleep(0.3)
                        blocks = make(2)
                    assert (await cache.stats()).tiers[Tier.SHARED].sheds["failing"] > 0
            assert running.stop() == 0

    run(scenario)
