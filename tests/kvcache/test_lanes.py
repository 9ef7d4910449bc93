"""Bulk lanes and pulls between real instances: right bytes, one use of a token, and every way to break a lane."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from hashlib import sha256
from pathlib import Path

import pytest
from katydid_cache import BlockLayout, CacheAdmin, CacheClient, Durability, PutBlock, PutStatus, Tier
from katydid_cache.lane import RECEIPT, Lane
from katydid_cache.lane_reads import LEAST_BYTES
from katydid_kvcache.lanes.desk import LaneDesk
from katydid_runtime.errors import PermissionDeniedError, UnauthenticatedError, UnsupportedError
from xxhash import xxh3_128_digest

from tests.certificates import make_certificate, needs_openssl
from tests.kvcache.inside import BLOCK, get, key, opened, payload, put
from tests.kvcache.running import IDENTITY, MIB, ServiceProcess, run

LAYOUT = BlockLayout(layers=8, kv_heads=8, head_dim=64, dtype="bfloat16")
"""1 MiB a block, so that a few are worth a lane."""

SIZE = LAYOUT.block_bytes
LANES = {"memory_bytes": 32 * MIB, "slab_bytes": 4 * MIB, "lane_listen": "127.0.0.1:0"}


def make(count: int) -> list[PutBlock]:
    hashes = [os.urandom(32) for _ in range(count)]
    return [PutBlock(hashes[place], hashes[place - 1] if place else b"", os.urandom(SIZE)) for place in range(count)]


def packed(blocks: list[PutBlock]) -> bytes:
    return b"".join(block.hash for block in blocks)


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(SIZE)) for _ in range(count)]


@asynccontextmanager
async def client(address: str, **options: object) -> AsyncIterator[CacheClient]:
    async with CacheClient(address, **options) as cache:  # type: ignore[arg-type]
        await cache.attach(IDENTITY, LAYOUT)
        yield cache


async def whole(cache: CacheClient, blocks: list[PutBlock]) -> bool:
    """Whether a get brings every block, whatever way it takes."""
    into = buffers(len(blocks))
    got = await cache.get(0, packed(blocks), into=into)
    return all(got.found) and all(buffer == block.payload for buffer, block in zip(into, blocks, strict=True))


def workers_of(service: ServiceProcess) -> list[int]:
    """Processes that receive lanes for it."""
    pids = Path(f"/proc/{service.process.pid}/task").glob("*/children")
    children = [int(pid) for file in pids for pid in file.read_text().split()]
    return [pid for pid in children if b"lanes.receiver" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_large_get_takes_the_lanes_and_a_lane_serves_again() -> None:
    async def scenario() -> None:
        with ServiceProcess(**LANES) as service:
            async with client(service.address, lanes=2) as cache:
                blocks = make(24)
                assert LEAST_BYTES < 24 * SIZE
                await cache.put(blocks)
                for _ in range(3):
                    assert await whole(cache, blocks)
                # The service counts when it has read the receipt, a moment after the client has sent it.
                while (sent := (await cache.stats()).sent_bytes) < 3 * 24 * SIZE:
                    await asyncio.sleep(0.01)
                assert sent == 3 * 24 * SIZE
                # What is not there is a miss with its reason, and the rest comes all the same.
                into = buffers(9)
                absent = make(1)
                got = await cache.get(0, packed(blocks[:4] + absent + blocks[4:8]), into=into)
                assert got.found == (*[True] * 4, False, *[True] * 4)
                assert got.misses[4].name == "ABSENT"

    run(scenario)


def test_blocks_on_disk_come_over_a_lane_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        options = {**LANES, "disk_bytes": 64 * MIB}
        blocks, into = make(5), buffers(5)
        with ServiceProcess(tmp_path, **options) as service:
            async with client(service.address) as cache:
                await cache.put(blocks, durability=Durability.DISK)
        with ServiceProcess(tmp_path, **options) as restarted:
            async with client(restarted.address) as cache:
                cache._get_call = None  # a stream would fail
                got = await cache.get(0, packed(blocks), into=into)
                assert [bytes(buffer) for buffer in into] == [block.payload for block in blocks]
                assert [(time.tier, time.blocks) for time in got.times] == [(Tier.DISK, 5)]

    run(scenario)


def test_a_token_is_good_once_and_nothing_else_opens_a_lane() -> None:
    async def scenario() -> None:
        with ServiceProcess(**LANES) as service:
            async with client(service.address) as cache:
                blocks = make(2)
                await cache.put(blocks)
                offer = await cache.pulls.open_lane(packed(blocks))
                assert offer.checksums == tuple(xxh3_128_digest(block.payload) for block in blocks)
                into, intact = buffers(2), list[bool]()
                with closing(Lane("127.0.0.1", cache.lane_port, stall_s=5)) as lane:
                    await asyncio.to_thread(lane.receive, offer.token, into, offer.checksums, intact)
                assert intact == [True, True]
                assert [bytes(buffer) for buffer in into] == [block.payload for block in blocks]
                for token in (offer.token, os.urandom(16)):
                    with closing(Lane("127.0.0.1", cache.lane_port, stall_s=5)) as other, pytest.raises(OSError):
                        await asyncio.to_thread(other.receive, token, buffers(2), offer.checksums, [])
                # Garbage and silence harm nobody.
                for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 100, b"", b"short"):
                    with socket.create_connection(("127.0.0.1", cache.lane_port)) as connection, suppress(OSError):
                        connection.sendall(garbage)
                assert await whole(cache, blocks)
        with ServiceProcess() as service:
            async with client(service.address) as cache:
                assert cache.lane_port == 0
                with pytest.raises(UnsupportedError):
                    await cache.pulls.open_lane(bytes(32))

    run(scenario)


def test_blocks_wait_pinned_for_their_receipt_and_not_for_ever() -> None:
    async def scenario() -> None:
        with ServiceProcess(**LANES) as service:
            async with client(service.address) as cache, CacheAdmin(service.address) as admin:
                blocks = make(4)
                await cache.put(blocks)
                offer = await cache.pulls.open_lane(packed(blocks))
                with socket.create_connection(("127.0.0.1", cache.lane_port)) as connection:
                    connection.sendall(offer.token)
                    connection.recv(1000)
                    assert await admin.evict(IDENTITY) == 0, "the blocks are on their way"
                # The client is gone in mid-block: its blocks are free again.
                async with asyncio.timeout(10):
                    while await admin.evict(IDENTITY) == 0:
                        await asyncio.sleep(0.05)

    run(scenario)


def test_a_block_that_is_wrong_here_arrives_wrong_and_is_quarantined() -> None:
    async def scenario() -> None:
        async with opened() as (cache, space):
            for name in range(3):
                put(cache, space, name)
            desk = LaneDesk(cache, threads=1, stall_s=2.0)
            desk.start("127.0.0.1:0")
            offer = await desk.open(space, [key(name) for name in range(3)])
            cache.memory.view(space.blocks[key(1)])[5] ^= 1
            sums = [offer.checksums[at : at + 16] for at in range(0, len(offer.checksums), 16)]
            into, intact = [memoryview(bytearray(BLOCK)) for _ in range(3)], list[bool]()
            with closing(Lane("127.0.0.1", desk.port, stall_s=2)) as lane:
                await asyncio.to_thread(lane.receive, offer.token, into, sums, intact)
                async with asyncio.timeout(5):
                    while not cache.quarantined:
                        await asyncio.sleep(0.01)
            assert intact == [True, False, True]
            assert [await get(cache, space, name) == payload(name) for name in range(3)] == intact
            await desk.stop()

    run(scenario)


def test_a_block_that_arrives_wrong_and_is_right_here_stays() -> None:
    async def scenario() -> None:
        with ServiceProcess(**LANES) as service:
            async with client(service.address) as cache:
                blocks = make(3)
                await cache.put(blocks)
                offer = await cache.pulls.open_lane(packed(blocks))

                told = threading.Event()

                def lie() -> None:
                    """Say of a good block that it was wrong."""
                    with socket.create_connection(("127.0.0.1", cache.lane_port)) as connection:
                        connection.sendall(offer.token)
                        left = 3 * SIZE
                        while left:
                            left -= len(connection.recv(min(left, MIB)))
                        connection.sendall(RECEIPT.pack(1) + RECEIPT.pack(1))
                        told.set()
                        connection.recv(1)

                threading.Thread(target=lie, daemon=True).start()
                assert await asyncio.to_thread(told.wait, 5)
                await asyncio.sleep(0.3)
                stats = await cache.stats()
                assert stats.quarantined == 0
                assert await whole(cache, blocks)

    run(scenario)


def test_a_lane_that_breaks_in_the_middle_costs_no_block() -> None:
    """A gate in front of the lane port lets 1.5 blocks through and closes; the stream brings the rest."""

    async def scenario() -> None:
        with ServiceProcess(**LANES) as service:
            async with client(service.address) as cache:
                blocks = make(8)
                await cache.put(blocks)
                real = cache.lane_port
                passed = 0

                async def gate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                    nonlocal passed
                    upstream, down = await asyncio.open_connection("127.0.0.1", real)
                    down.write(await reader.readexactly(16))
                    while passed < 3 * SIZE // 2 and (piece := await upstream.read(64 * 1024)):
                        passed += len(piece)
                        writer.write(piece)
                        await writer.drain()
                    writer.close()
                    down.close()

                server = await asyncio.start_server(gate, "127.0.0.1", 0)
                assert cache._attachment is not None
                cache._attachment.lane_port = server.sockets[0].getsockname()[1]
                into = buffers(8)
                got = await cache.get(0, packed(blocks), into=into)
                assert all(got.found)
                assert [bytes(buffer) for buffer in into] == [block.payload for block in blocks]
                assert passed >= SIZE
                assert not cache._lanes.usable(8 * SIZE), "lanes rest after one broke"
                server.close()

    run(scenario)


def test_instances_pull_over_lanes_and_survive_the_loss_of_workers_and_sources() -> None:
    async def scenario() -> None:
        with ExitStack() as stack:
            source = stack.enter_context(ServiceProcess(**LANES))
            target = stack.enter_context(ServiceProcess(**LANES, lanes=2, pull_from=source.address))
            async with client(source.address) as there, client(target.address, lanes=0) as here:
                blocks = make(20)
                await there.put(blocks)
                assert workers_of(target) == [], "workers are made when they are needed"
                result = await here.pulls.pull(source.address, packed(blocks))
                assert (result.pulled, result.present, result.missed) == (20, 0, 0)
                assert await whole(here, blocks)
                absent = make(1)
                again = await here.pulls.pull(source.address, packed(blocks[:3] + absent))
                assert (again.pulled, again.present, again.missed) == (0, 3, 1)
                with pytest.raises(PermissionDeniedError):
                    await here.pulls.pull("127.0.0.1:1", packed(absent))
                with pytest.raises(UnsupportedError):
                    await there.pulls.pull(target.address, packed(absent))

                # A worker killed under an order: what it had is missed, and the next order has a new one.
                workers = workers_of(target)
                assert workers
                for worker in workers:
                    os.kill(worker, signal.SIGKILL)
                more = make(4)
                await there.put(more)
                pulled = 0
                async with asyncio.timeout(10):
                    while pulled < 4:
                        pulled += (await here.pulls.pull(source.address, packed(more))).pulled
                assert await whole(here, more)

                # A source stopped in the middle: the deadline is kept, and no slot stays behind.
                source.process.send_signal(signal.SIGSTOP)
                hung = make(4)
                result = await here.pulls.pull(source.address, packed(hung), deadline_s=0.5)
                assert result.missed == 4
                source.process.send_signal(signal.SIGCONT)
                await there.put(hung)
                async with asyncio.timeout(20):
                    while (await here.pulls.pull(source.address, packed(hung))).missed:
                        await asyncio.sleep(0.1)
                assert await whole(here, hung)

    run(scenario)


def test_two_pulls_of_the_same_blocks_bring_them_once_and_both_have_them() -> None:
    async def scenario() -> None:
        with ExitStack() as stack:
            source = stack.enter_context(ServiceProcess(**LANES))
            target = stack.enter_context(ServiceProcess(**LANES, lanes=2, pull_from=source.address))
            async with client(source.address) as there, client(target.address, lanes=0) as here:
                known, blocks = make(1), make(4)
                await there.put(known + blocks)
                assert (await here.pulls.pull(source.address, packed(known))).pulled == 1
                source.process.send_signal(signal.SIGSTOP)
                pulls = [
                    asyncio.create_task(here.pulls.pull(source.address, packed(blocks), deadline_s=20.0))
                    for _ in range(2)
                ]
                # It is over before either: whoever waits keeps its own deadline, and whoever waits for it goes on.
                result = await here.pulls.pull(source.address, packed(blocks), deadline_s=0.5)
                assert (result.pulled, result.present, result.missed) == (0, 0, 4)
                source.process.send_signal(signal.SIGCONT)
                results = await asyncio.gather(*pulls)
                assert [result.missed for result in results] == [0, 0]
                assert sum(result.pulled for result in results) == 4
                assert await whole(here, blocks)

    run(scenario)


def test_a_source_without_lanes_is_pulled_from_by_stream() -> None:
    async def scenario() -> None:
        with ExitStack() as stack:
            source = stack.enter_context(ServiceProcess(memory_bytes=32 * MIB, slab_bytes=4 * MIB))
            target = stack.enter_context(ServiceProcess(**LANES, pull_from=source.address))
            async with client(source.address) as there, client(target.address, lanes=0) as here:
                blocks = make(10)
                await there.put(blocks)
                assert (await here.pulls.pull(source.address, packed(blocks[:6]))).pulled == 6
                workers = workers_of(target)
                assert workers, "beside the service's own loop"
                for pid in workers:
                    os.kill(pid, signal.SIGKILL)
                while workers_of(target):
                    await asyncio.sleep(0.01)
                assert (await here.pulls.pull(source.address, packed(blocks[6:]))).pulled == 4
                assert await whole(here, blocks)

    run(scenario)


@needs_openssl
def test_under_tls_there_are_no_lanes_and_instances_pull_by_stream(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)

    async def scenario() -> None:
        with ExitStack() as stack:
            options = {**LANES, **certificate.settings(mutual=True), "listen": "localhost:0"}
            source = stack.enter_context(ServiceProcess(**options))
            target = stack.enter_context(
                ServiceProcess(**options, tls_ca_file=certificate.cert_file, pull_from=source.address)
            )
            known = certificate.shown
            async with client(source.address, tls=known) as there, client(target.address, tls=known) as here:
                assert there.lane_port == here.lane_port == 0
                blocks = make(6)
                await there.put(blocks)
                assert (await here.pulls.pull(source.address, packed(blocks))).pulled == 6
                assert await whole(here, blocks)

    run(scenario)


def test_tokens_are_asked_for_by_every_instance_and_shown_by_those_that_pull(tmp_path: Path) -> None:
    tokens = {"engine": "read,write", "reader": "read", "operator": "admin"}
    file, own = tmp_path / "tokens", tmp_path / "own"
    file.write_text(
        "".join(f"{name} {scopes} {sha256(name.encode()).hexdigest()}\n" for name, scopes in tokens.items())
    )
    own.write_text("reader\n")

    async def scenario() -> None:
        with ExitStack() as stack:
            options = {**LANES, "tokens_file": file, "kvcache_token_file": own}
            source = stack.enter_context(ServiceProcess(**options))
            target = stack.enter_context(ServiceProcess(**options, pull_from=source.address))
            for token in (None, "guess"):
                async with CacheClient(source.address, token=token) as cache:
                    with pytest.raises(UnauthenticatedError):
                        await cache.stats()
            async with client(source.address, token="engine") as there, client(target.address, token="engine") as here:
                blocks = make(6)
                assert [outcome.status for outcome in await there.put(blocks)] == [PutStatus.STORED] * 6
                assert (await here.pulls.pull(source.address, packed(blocks))).pulled == 6
                assert await whole(here, blocks)
            async with client(source.address, token="reader") as reader:
                assert await whole(reader, blocks)
                with pytest.raises(PermissionDeniedError):
                    await reader.put(make(1))
                with pytest.raises(PermissionDeniedError):
                    await reader.pulls.pull(source.address, bytes(32))
            async with CacheAdmin(source.address, token="engine") as admin:
                with pytest.raises(PermissionDeniedError):
                    await admin.evict(IDENTITY)
            async with CacheAdmin(source.address, token="operator") as admin:
                assert await admin.evict(IDENTITY) == 6

    run(scenario)
