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
