"""Blocks on their way to the shared store are gathered into packs, and a flush waits for what there is, no longer."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.shared.backend import Outgoing
from katydid_kvcache.shared.packing import Packer

from tests.kvcache.inside import key, payload
from tests.kvcache.running import IDENTITY, LAYOUT, run

BLOCK = LAYOUT.block_bytes


def block(space: Namespace, name: int) -> Block:
    made = Block(space, key(name), b"")
    made.checksum = bytes(16)
    return made


def test_a_flush_does_not_wait_for_what_came_after_it() -> None:
    async def scenario() -> None:
        space, names, packs = Namespace(IDENTITY, LAYOUT), itertools.count(1), list[list[bytes]]()

        async def publish(_space: Namespace, pack: list[Outgoing]) -> None:
            packs.append([outgoing.entry.name for outgoing in pack])
            name = next(names)
            assert packer.take(block(space, name), memoryview(payload(name)), 0.0), "the next one is on its way"
            await asyncio.sleep(0)

        packer = Packer(publish, pack_bytes=BLOCK, queue_bytes=8 * BLOCK, linger_s=60, sheds=Counter())
        assert packer.take(block(space, 0), memoryview(payload(0)), 0.0)
        async with asyncio.timeout(5):
            await packer.flush()
        assert packs[0] == [key(0)]
        packer.close()

    run(scenario)


def test_a_pack_goes_when_it_is_full_or_when_its_first_block_has_waited_long_enough() -> None:
    async def scenario() -> None:
        space, packs, sheds = Namespace(IDENTITY, LAYOUT), list[int](), Counter[str]()

        async def publish(_space: Namespace, pack: list[Outgoing]) -> None:
            packs.append(len(pack))

        packer = Packer(publish, pack_bytes=3 * BLOCK, queue_bytes=4 * BLOCK, linger_s=0.05, sheds=sheds)

        def take(name: int) -> bool:
            return packer.take(block(space, name), memoryview(payload(name)), 0.0)

        assert all(take(name) for name in range(3))
        await asyncio.sleep(0.01)
        assert packs == [3], "nothing more fits, nothing is waited for"
        assert packer.bytes_in_flight == 0
        assert not any(packer.holds(block(space, name)) for name in range(3))
        assert take(10)
        assert packer.holds(block(space, 10))
        timer = packer._timers[space]
        assert take(11)
        assert packer._timers[space] is timer, "the second block does not put it off"
        while len(packs) < 2:
            await asyncio.sleep(0.005)
        assert packs == [3, 2]
        assert [take(name) for name in range(20, 26)] == [True] * 4 + [False] * 2
        assert sheds == {"queue_full": 2}
        packer.close()

    run(scenario)
