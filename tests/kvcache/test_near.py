"""Engines with an instance on their own host: what one writes, another reads in its own host's memory."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

from katydid_cache import CacheClient, CacheFleet, Instances, NearCache, PutStatus, Tier
from katydid_cache.placement import rank

from tests.kvcache.running import IDENTITY, LAYOUT, ServiceProcess, chain, run
from tests.kvcache.test_fleet import RUN, free_ports, make_chain


def test_blocks_go_from_instance_to_instance_and_are_read_in_place(tmp_path: Path) -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    source = ",".join(addresses)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            services, caches = [], []
            for number, address in enumerate(addresses):
                service = ServiceProcess(
                    listen=f"unix:{tmp_path}/{number}.sock",
                    peer_listen=address,
                    lane_listen="127.0.0.1:0",
                    pull_from=source,
                )
                services.append(stack.enter_context(service))
            for number in (0, 1):
                near = CacheClient(services[number].address, name=f"near {number}", degrade=True)
                others = CacheFleet(Instances(source), run_blocks=RUN)
                cache = await stack.enter_async_context(NearCache(near, others))
                assert await cache.attach(IDENTITY, LAYOUT, arena=True)
                assert cache.arena is not None
                caches.append(cache)
            writer, reader = caches
            blocks = make_chain(24)
            while len({rank(block.run, addresses)[0] for block in blocks}) < 3:
                blocks = make_chain(24)
            outcomes = await writer.put(blocks)
            assert {outcome.status for outcome in outcomes} == {PutStatus.STORED}
            hashes = chain(blocks)
            deadline = time.monotonic() + 10
            while True:
                found = await reader.lookup(hashes)
                if found.blocks == 24:
                    break
                await reader.release(found.lease)
                assert time.monotonic() < deadline, "the homes did not take what was offered"
                await asyncio.sleep(0.05)
            assert found.runs[-1].tier is Tier.SHARED
            # As an engine reads: what is not in memory is waited for, then it lies in this host's arena.
            at = found.runs[0].blocks if found.runs[0].tier is Tier.MEMORY else 0
            wanted = blocks[at : at + 8]
            there = await reader.prefetch(chain(wanted), deadline_s=30.0, wait=True)
            assert there.blocks == len(wanted)
            for slot, block in zip(there.slots, wanted, strict=True):
                view = reader.arena.view[slot.offset : slot.offset + LAYOUT.block_bytes]
                assert view == block.payload
            into = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in blocks]
            got = await reader.get(found.lease, hashes, into=into)
            assert all(got.found)
            assert all(buffer == block.payload for buffer, block in zip(into, blocks, strict=True))
            await reader.release(found.lease)
            again = await reader.lookup(hashes)
            assert [(each.tier, each.blocks) for each in again.runs] == [(Tier.MEMORY, 24)]
            await reader.release(again.lease)

            # Without the others the near instance goes on alone.
            for service in (services[0], services[2]):
                service.kill()
            started = time.monotonic()
            assert (await reader.lookup(hashes)).blocks == 24
            missing = make_chain(8)
            assert (await reader.lookup(chain(missing))).blocks == 0
            assert time.monotonic() - started < 15
            assert (await reader.put(missing))[0].status is PutStatus.STORED
            for service in services:
                async with CacheClient(service.address) as client:
                    if service.process.poll() is None:
                        assert (await client.stats()).pulled > 0

    run(scenario)
