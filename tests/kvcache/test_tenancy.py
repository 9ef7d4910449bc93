"""Tenants, sessions and the policy file against a running service."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from katydid_cache import Asker, CacheClient, Durability, PutOutcome, PutRefusal, PutStatus, Tier, asking

from tests.kvcache.running import LAYOUT, MIB, ServiceProcess, chain, make, run

pytestmark = pytest.mark.e2e

ALICE, BOB = b"a" * 16, b"b" * 16
STORED = PutOutcome(PutStatus.STORED)


def policy(folder: Path, text: str) -> str:
    path = folder / "policy.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("arena", [False, True])
def test_with_sharing_by_tenant_nobody_finds_anothers_blocks(tmp_path: Path, arena: bool) -> None:
    async def scenario() -> None:
        listen = {"listen": f"unix:{tmp_path}/cache.sock"} if arena else {}
        with ServiceProcess(policy_file=policy(tmp_path, "sharing: tenant"), **listen) as running:
            async with CacheClient(running.address) as cache:
                await cache.attach(os.urandom(32), LAYOUT, arena=arena)
                blocks = make(2)
                with asking(Asker(ALICE)):
                    assert await cache.put(blocks) == [STORED] * 2
                into = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in blocks]
                for tenant, there in ((ALICE, 2), (BOB, 0), (b"", 0)):
                    with asking(Asker(tenant)):
                        found = await cache.lookup(chain(blocks))
                        assert found.blocks == there
                        got = await cache.get(found.lease, chain(blocks), into=into)
                        assert got.prefix == there
                        assert (await cache.prefetch(chain(blocks))).blocks == there
                assert [bytes(buffer) for buffer in into] == [bytes(block.payload) for block in blocks]
                with asking(Asker(BOB)):
                    assert await cache.put(blocks) == [STORED] * 2, "the same blocks are there twice"
                assert (await cache.stats()).tiers[Tier.MEMORY].blocks == 4

    run(scenario)


def test_with_sharing_none_a_session_is_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ServiceProcess(policy_file=policy(tmp_path, "sharing: none")) as running:
            async with CacheClient(running.address) as cache:
                await cache.attach(os.urandom(32), LAYOUT)
                blocks = make(1)
                with asking(Asker(ALICE, b"1" * 16)):
                    await cache.put(blocks)
                    assert (await cache.lookup(chain(blocks))).blocks == 1
                with asking(Asker(ALICE, b"2" * 16)):
                    assert (await cache.lookup(chain(blocks))).blocks == 0

    run(scenario)


def test_a_quota_bounds_a_tenant_and_stats_tell(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = f"tenants: {{each: {{memory: {{limit: {4 * LAYOUT.block_bytes}}}}}}}"
        with ServiceProcess(policy_file=policy(tmp_path, text)) as running:
            async with CacheClient(running.address) as cache:
                await cache.attach(os.urandom(32), LAYOUT)
                mine, others = make(6), make(3)
                assert await cache.put(mine, tenant=ALICE) == [STORED] * 6
                assert await cache.put(others, tenant=BOB) == [STORED] * 3
                with asking(Asker(ALICE)):
                    held = await cache.lookup(chain(mine[2:]))
                    assert held.blocks == 4
                    refused = await cache.put(make(1))
                    assert refused == [PutOutcome(PutStatus.REFUSED, PutRefusal.QUOTA)]
                    await cache.release(held.lease)
                    assert await cache.put(make(1)) == [STORED]
                with asking(Asker(BOB)):
                    assert (await cache.lookup(chain(others))).blocks == 3
                await asyncio.sleep(0.1)
                stats = await cache.stats()
                alice, bob = stats.tenants[ALICE], stats.tenants[BOB]
                assert alice.tiers[Tier.MEMORY].bytes == 4 * LAYOUT.block_bytes
                assert alice.tiers[Tier.MEMORY].limit_bytes == 4 * LAYOUT.block_bytes
                assert (alice.refused, bob.refused) == (1, 0)
                assert bob.tiers[Tier.MEMORY].hit_tokens == 3 * 64
                assert bob.saved_prefill_s == pytest.approx(3 * 64 / 10_000, rel=0.01)
                assert stats.tiers[Tier.MEMORY].sheds == {"quota": 1}
                assert stats.tiers[Tier.MEMORY].eviction == "lru"
                rates = stats.tiers[Tier.MEMORY].hit_rates
                assert [rate.capacity_bytes for rate in rates] == [4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB]

    run(scenario)


def test_sessions_end_and_slide(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ServiceProcess(tmp_path) as running:
            async with CacheClient(running.address) as cache:
                await cache.attach(os.urandom(32), LAYOUT)
                sliding, fixed, lone = make(1), make(1), make(1)
                for blocks, session, slides in ((sliding, b"1" * 16, True), (fixed, b"2" * 16, False)):
                    with asking(Asker(session=session, session_ttl_s=1.5, sliding=slides)):
                        await cache.put(blocks, durability=Durability.DISK)
                await cache.put(lone, ttl_s=1.5, sliding=True)
                ended = False
                while not ended:
                    await asyncio.sleep(0.1)
                    ended = (await cache.lookup(chain(fixed), lease=False)).blocks == 0
                    with asking(Asker(session=b"1" * 16)):
                        assert (await cache.lookup(chain(sliding), lease=False)).blocks == 1
                    assert (await cache.lookup(chain(lone), lease=False)).blocks == 1
                await asyncio.sleep(1.6)
                assert (await cache.lookup(chain(sliding), lease=False)).blocks == 0

    run(scenario)


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("tiers:\n  memory: {eviction: fifo}\n", [], "policy.yaml:2: tiers.memory.eviction is fifo; allowed: lru, lfu"),
        (
            "tiers: {memory: {bytes: 8MiB}}\n",
            ["--memory-bytes=8388608", "--slab-bytes=1048576"],
            "tells it too; allowed: one of the two",
        ),
        ("tiers: {memory: {bytes: 8MiB}}\n", ["--slab-bytes=16777216"], "must hold a slab of 16777216 bytes"),
    ],
)
def test_a_bad_policy_file_stops_the_start(tmp_path: Path, text: str, more: list[str], said: str) -> None:
    words = [sys.executable, "-m", "katydid_kvcache", f"--policy-file={policy(tmp_path, text)}", *more]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
