"""The service process from outside: protocol abuse, events, administration, telemetry, drain, and full disks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from katydid_cache import (
    BlockChange,
    CacheAdmin,
    CacheClient,
    Durability,
    PutBlock,
    PutOutcome,
    PutStatus,
    Snapshot,
    Tier,
)
from katydid_runtime.errors import (
    NotFoundError,
    UnsupportedError,
)
from katydid_runtime.trace_context import TraceContext

from tests.kvcache.running import IDENTITY, LAYOUT, MIB, ServiceProcess, chain, make, run

pytestmark = pytest.mark.e2e

SERVICE = "katydid.kvcache.v1.KvCacheService"
STORED = PutOutcome(PutStatus.STORED)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("disk")
    with ServiceProcess(folder, memory_bytes=2 * MIB) as running:
        yield running


def test_watch_gives_a_snapshot_and_every_change(service: ServiceProcess) -> None:
    async def scenario() -> None:
        space = os.urandom(32)
        async with CacheClient(service.address) as cache, CacheAdmin(service.address) as admin:
            await cache.attach(space, LAYOUT)
            old, new = make(2), make(2)
            await cache.put(old, durability=Durability.DISK)
            watch = cache.watch(space)
            held: dict[Tier, set[bytes]] = {Tier.MEMORY: set(), Tier.DISK: set()}
            sequence = 0

            async def follow(until: Callable[[], bool]) -> None:
                nonlocal sequence
                while not until():
                    event = await anext(watch)
                    assert event.sequence == sequence + 1
                    assert event.boot_epoch == cache.boot_epoch
                    sequence = event.sequence
                    if isinstance(event, Snapshot):
                        held[event.tier] |= _split(event.hashes)
                    else:
                        assert isinstance(event, BlockChange)
                        held[event.tier] |= _split(event.stored)
                        held[event.tier] -= _split(event.removed)

            both = {block.hash for block in [*old, *new]}
            await follow(lambda: held[Tier.DISK] == {block.hash for block in old} and sequence >= 3)
            await cache.put(new, durability=Durability.DISK)
            await follow(lambda: held == {Tier.MEMORY: both, Tier.DISK: both})
            assert await admin.evict(space, old[0].hash) == 1
            await follow(lambda: held == {Tier.MEMORY: both - {old[0].hash}, Tier.DISK: both - {old[0].hash}})
            assert await admin.evict(space) == 3
            await follow(lambda: not held[Tier.MEMORY] and not held[Tier.DISK])
            await watch.aclose()

    run(scenario)


def _split(packed: bytes) -> set[bytes]:
    return {packed[start : start + 32] for start in range(0, len(packed), 32)}


def test_administration(service: ServiceProcess) -> None:
    async def scenario() -> None:
        space = os.urandom(32)
        async with CacheClient(service.address) as cache, CacheAdmin(service.address) as admin:
            await cache.attach(space, LAYOUT)
            blocks = make(3)
            await cache.put(blocks)
            await admin.flush()
            assert (await cache.stats()).tiers[Tier.DISK].blocks >= 3
            (listed,) = [info for info in await admin.namespaces() if info.identity == space]
            assert (listed.layout, listed.blocks, listed.attachments) == (LAYOUT, 3, 1)
            verified = await admin.verify()
            assert verified.blocks >= 3
            assert verified.corrupt == 0
            found = await cache.lookup(blocks[0].hash)
            assert await admin.evict(space) == 2
            assert (await cache.lookup(blocks[0].hash, lease=False)).blocks == 1
            await cache.release(found.lease)
            assert await admin.evict(space) == 1
            with pytest.raises(NotFoundError):
                await admin.evict(os.urandom(32))

    run(scenario)


def test_health_reflection_and_admin_at_its_own_address(tmp_path: Path) -> None:
    socket = f"unix:{tmp_path}/admin.sock"

    async def scenario() -> None:
        with ServiceProcess(admin_listen=socket) as running:
            async with CacheAdmin(socket) as admin, CacheAdmin(running.address) as beside:
                assert await admin.namespaces() == []
                with pytest.raises(UnsupportedError):
                    await beside.namespaces()
            async with grpc.aio.insecure_channel(running.address) as channel:
                health: Any = health_pb2_grpc.HealthStub(channel)
                answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
                asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
                names = [
                    service.name
                    async for part in reflection.ServerReflectionInfo(asked)
                    for service in part.list_services_response.service
                ]
                assert SERVICE in names
            assert await asyncio.to_thread(running.stop) == 0

    run(scenario)


def test_spans_hang_under_the_caller_and_delays_show_in_them(tmp_path: Path) -> None:
    trace_file = tmp_path / "trace.jsonl"
    lookup, get = TraceContext("1" * 32, "2" * 16), TraceContext("3" * 32, "4" * 16)

    async def scenario() -> None:
        with ServiceProcess(trace_file=trace_file, fault_delays="lookup:150,get:250") as running:
            async with CacheClient(running.address) as cache:
                await cache.attach(IDENTITY, LAYOUT)
                blocks = make(2)
                await cache.put(blocks)
                found = await cache.lookup(chain(blocks), trace=lookup)
                assert found.duration_s >= 0.15
                into = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in blocks]
                await cache.get(found.lease, chain(blocks), into=into, trace=get)
            running.stop()

    run(scenario)
    spans = {span["name"]: span for span in map(json.loads, trace_file.read_text().splitlines())}
    for name, caller, least_s in (("kvcache.service.lookup", lookup, 0.15), ("kvcache.service.get", get, 0.25)):
        span = spans[name]
        assert (span["trace_id"], span["parent"]) == (caller.trace_id, caller.span_id)
        assert least_s <= (span["end_ns"] - span["start_ns"]) / 1e9
    assert spans["kvcache.service.lookup"]["attributes"]["kvcache.blocks.found"] == 2
    assert spans["kvcache.service.get"]["attributes"]["kvcache.bytes"] == 2 * LAYOUT.block_bytes


def test_metrics(tmp_path: Path) -> None:
    port = _free_port()

    async def scenario() -> None:
        with ServiceProcess(tmp_path, http_listen=f"127.0.0.1:{port}") as running:
            async with CacheClient(running.address) as cache:
                await cache.attach(IDENTITY, LAYOUT)
                blocks = make(2)
                await cache.put(blocks, durability=Durability.DISK)
                await cache.lookup(chain(blocks))
                deadline = time.monotonic() + 30
                while 'katydid_kvcache_hit_blocks_total{tier="memory"} 2.0' not in (text := await _fetch(port)):
                    assert time.monotonic() < deadline, text
                    await asyncio.sleep(0.1)
            for line in (
                'katydid_kvcache_kept_blocks{tier="disk"} 2.0',
                f'katydid_kvcache_kept_bytes{{tier="memory"}} {2 * LAYOUT.block_bytes}.0',
                "katydid_kvcache_lookup_seconds_count 1.0",
                'katydid_kvcache_tenant_hit_tokens_total{tenant="",tier="memory"} 128.0',
                f'katydid_kvcache_tenant_held_bytes{{tenant="",tier="memory"}} {2 * LAYOUT.block_bytes}.0',
                f"katydid_kvcache_received_bytes_total {2 * LAYOUT.block_bytes}.0",
            ):
                assert line in text

    run(scenario)


async def _fetch(port: int) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
            return str(response.read(), "utf-8")

    return await asyncio.to_thread(read)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_second_service_on_the_folder_exits_with_one_line(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path):
        command = [sys.executable, "-m", "katydid_kvcache", f"--disk-path={tmp_path}", "--log-level=error"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode == 2
    assert second.stderr == f"kvcache: disk_path {tmp_path} is used by another service\n"


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--memory-bytes=5", "memory_bytes"),
        ("--fault-delays=sing:1", "one of lookup, get"),
        ("--disk-path=/proc/katydid", "/proc/katydid"),
        ("--slab-bytes=100000", "multiple of 4096"),
    ],
)
def test_wrong_settings_exit_with_one_line(option: str, told: str) -> None:
    command = [sys.executable, "-m", "katydid_kvcache", "--listen=127.0.0.1:0", "--log-level=error", option]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert told in ended.stderr.replace("-", "_") or told in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_drain_tells_clients_and_writes_down_what_is_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        blocks = make(20)
        with ServiceProcess(tmp_path) as running:
            async with CacheClient(running.address, degrade=True) as cache:
                await cache.attach(IDENTITY, LAYOUT)
                await cache.put(blocks)
                stopping = asyncio.create_task(asyncio.to_thread(running.stop))
                while cache.attached:
                    await asyncio.sleep(0.001)
                assert (await cache.lookup(chain(blocks))).reachable is False
                assert await stopping == 0
        with ServiceProcess(tmp_path) as again:
            async with CacheClient(again.address) as cache:
                await cache.attach(IDENTITY, LAYOUT)
                assert (await cache.lookup(chain(blocks))).blocks == 20

    run(scenario)


def test_a_full_filesystem_degrades_to_what_fits(tmp_path: Path) -> None:
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting a small tmpfs needs privileges")

    async def scenario() -> None:
        with ServiceProcess(tmp_path, memory_bytes=4 * MIB, index_map_bytes=16 * MIB) as running:
            async with CacheClient(running.address) as cache:
                await cache.attach(IDENTITY, LAYOUT)
                blocks: list[PutBlock] = []
                disk = (await cache.stats()).tiers[Tier.DISK]
                while disk.capacity_bytes >= 6 * MIB:  # until the disk has found out
                    batch = make(50)
                    assert await cache.put(batch) == [STORED] * 50
                    blocks += batch
                    disk = (await cache.stats()).tiers[Tier.DISK]
                recent = blocks[-40:]
                into = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in recent]
                result = await cache.get(0, chain(recent), into=into)
                assert all(
                    not found or buffer == block.payload
                    for found, buffer, block in zip(result.found, into, recent, strict=True)
                )
                assert any(result.found)
                assert disk.shed > 0
                assert disk.capacity_bytes > 0

    try:
        run(scenario)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
