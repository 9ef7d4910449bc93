"""One cache of three real instances: chains spread over them, killed, stopped, joined by and left by instances."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

from katydid_cache import CacheClient, CacheFleet, Instances, PutBlock, PutStatus, Tier
from katydid_cache.hot_runs import HotRuns
from katydid_cache.placement import rank

from tests.kvcache.running import IDENTITY, LAYOUT, ServiceProcess, chain, run

RUN = 4
BOUND_S = 3.0
"""What a lookup or read may take with an instance that does not answer, on a busy machine."""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def make_chain(blocks: int) -> list[PutBlock]:
    hashes = [os.urandom(32) for _ in range(blocks)]
    return [
        PutBlock(
            hashes[place],
            hashes[place - 1] if place else b"",
            os.urandom(LAYOUT.block_bytes),
            hashes[place - place % RUN],
        )
        for place in range(blocks)
    ]


@asynccontextmanager
async def fleet(source: str, *, hot: HotRuns | None = None) -> AsyncIterator[CacheFleet]:
    async with CacheFleet(Instances(source), name="test", run_blocks=RUN, hot=hot) as cache:
        assert await cache.attach(IDENTITY, LAYOUT)
        yield cache


async def read(cache: CacheFleet, blocks: Sequence[PutBlock]) -> int:
    """Look a chain up and read what is found; how many blocks, all of them right."""
    found = await cache.lookup(chain(list(blocks)))
    buffers = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(found.blocks)]
    got = await cache.get(found.lease, chain(list(blocks[: found.blocks])), into=buffers)
    await cache.release(found.lease)
    for buffer, block, good in zip(buffers, blocks, got.found, strict=False):
        assert not good or buffer == block.payload
    return got.prefix


async def until(met, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not await met():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        await asyncio.sleep(0.05)


def test_a_chain_is_spread_by_runs_and_read_as_one() -> None:
    async def scenario() -> None:
        with ExitStack() as stack:
            services = [stack.enter_context(ServiceProcess()) for _ in range(3)]
            source = ",".join(service.address for service in services)
            async with fleet(source) as cache:
                blocks = make_chain(24)
                outcomes = await cache.put(blocks)
                assert {outcome.status for outcome in outcomes} == {PutStatus.STORED}
                found = await cache.lookup(chain(blocks))
                assert [(each.tier, each.blocks) for each in found.runs] == [(Tier.MEMORY, 24)]
                await cache.release(found.lease)
                assert await read(cache, blocks) == 24
                # In the middle of a run the client says what comes before.
                rest = await cache.lookup(chain(blocks[6:]), before=chain(blocks[4:6]))
                assert rest.blocks == 18
                await cache.release(rest.lease)
                for service in services:
                    async with CacheClient(service.address) as client:
                        await client.attach(IDENTITY, LAYOUT)
                        homes = [rank(block.run, [each.address for each in services])[0] for block in blocks]
                        own = [block for block, home in zip(blocks, homes, strict=True) if home == service.address]
                        assert (await client.lookup(chain(own), lease=False)).blocks == len(own)
                        stats = await client.stats()
                        assert stats.tiers[Tier.MEMORY].blocks == len(own)
                        assert stats.leases == 0

    run(scenario)


def test_a_stopped_and_a_killed_instance_cost_a_bounded_time_under_load() -> None:
    async def scenario() -> None:
        with ExitStack() as stack:
            services = [stack.enter_context(ServiceProcess()) for _ in range(3)]
            source = ",".join(service.address for service in services)
            async with fleet(source) as cache:
                chains = [make_chain(32) for _ in range(4)]
                slowest, finished = 0.0, 0
                over = asyncio.Event()

                async def use(blocks: list[PutBlock]) -> None:
                    """As an engine does: read what is there, and write back what was not."""
                    nonlocal slowest, finished
                    while not over.is_set():
                        started = time.monotonic()
                        have = await read(cache, blocks)
                        slowest = max(slowest, time.monotonic() - started)
                        finished += 1
                        if have < len(blocks):
                            await cache.put(blocks[have:])

                async def all_served() -> bool:
                    return all([await read(cache, blocks) == len(blocks) for blocks in chains])

                users = [asyncio.create_task(use(blocks)) for blocks in chains]
                await until(all_served)
                stopped, killed, _ = services
                stopped.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.5)
                await until(all_served)
                stopped.process.send_signal(signal.SIGCONT)
                killed.kill()
                await until(lambda: _settled(cache, 2))
                await until(all_served)
                over.set()
                await asyncio.gather(*users)
                assert slowest < BOUND_S
                assert finished > 20

    run(scenario)


async def _settled(cache: CacheFleet, usable: int) -> bool:
    return len(cache.members.usable) == usable


def test_instances_join_and_leave_without_a_word_to_anyone(tmp_path: Path) -> None:
    file = tmp_path / "instances"

    async def scenario() -> None:
        with ExitStack() as stack:
            options = {"lane_listen": "127.0.0.1:0", "pull_from": f"file:{file}"}
            services = [stack.enter_context(ServiceProcess(**options)) for _ in range(2)]
            file.write_text("".join(f"{service.address}\n" for service in services))
            async with fleet(f"file:{file}") as cache:
                chains = [make_chain(8) for _ in range(16)]
                for blocks in chains:
                    await cache.put(blocks)
                third = stack.enter_context(ServiceProcess(**options))
                file.write_text(file.read_text() + f"{third.address}\n")
                await until(lambda: _settled(cache, 3))
                for blocks in chains:
                    assert await read(cache, blocks) == 8, "what has another home now is found at the one before"
                moved = [
                    block.run
                    for blocks in chains
                    for block in blocks
                    if rank(block.run, cache.members.names)[0] == third.address
                ]
                assert moved, "no run has the newcomer as its home: the test would show nothing"
                async with CacheClient(third.address) as client:

                    async def copied() -> bool:
                        for blocks in chains:  # a copy that found no place is made when the run is asked for again
                            await read(cache, blocks)
                        return (await client.stats()).tiers[Tier.MEMORY].blocks == len(moved)

                    await until(copied)
                for address in [service.address for service in services]:
                    file.write_text(file.read_text().replace(f"{address}\n", ""))
                await until(lambda: _settled(cache, 1))
                assert await read(cache, make_chain(4)) == 0
                first = next(blocks for blocks in chains if blocks[0].run in moved)
                assert await read(cache, first[:RUN]) == RUN, "the newcomer has what was copied to it"

    run(scenario)


def test_a_hot_run_gets_a_second_home_and_survives_the_first() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
            source = ",".join(addresses)
            services = [
                stack.enter_context(ServiceProcess(listen=address, lane_listen="127.0.0.1:0", pull_from=source))
                for address in addresses
            ]
            cache = await stack.enter_async_context(fleet(source, hot=HotRuns(threshold=3.0)))
            blocks = make_chain(RUN)
            assert {outcome.status for outcome in await cache.put(blocks)} == {PutStatus.STORED}
            home, other = rank(blocks[0].run, source.split(","))
            client = await stack.enter_async_context(CacheClient(other))

            async def readable() -> bool:
                return await read(cache, blocks) == RUN

            async def copied() -> bool:
                return await readable() and (await client.stats()).tiers[Tier.MEMORY].blocks == RUN

            await until(copied)
            next(service for service in services if service.address == home).kill()
            await until(lambda: _settled(cache, 1))
            await until(readable)

    run(scenario)
