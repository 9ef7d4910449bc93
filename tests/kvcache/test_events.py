"""Block events inside the service: nothing twice, nothing of others, nothing dropped in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_cache.records import BlockChange, Snapshot, Tier, WatchEvent
from katydid_kvcache import events
from katydid_kvcache.events import EventHub
from katydid_kvcache.slabs import SlabAllocator
from katydid_kvcache.store import Change, Store
from katydid_runtime.errors import OverloadedError

from tests.kvcache.running import run
from tests.kvcache.test_store import PAGE, SMALL, write

A, B = b"a" * 32, b"b" * 32


def made() -> tuple[Store, EventHub]:
    hub: EventHub
    store = Store(SlabAllocator(4, 8 * PAGE), None, changed=lambda change: hub.publish(change), now=lambda: 0.0)
    hub = EventHub(store, 7)
    return store, hub


async def snapshot(watching: AsyncIterator[WatchEvent]) -> bytes:
    hashes = b""
    while isinstance(event := await anext(watching), Snapshot):
        hashes += event.hashes
        if event.last:
            return hashes
    raise AssertionError("a change came before the snapshot was over")


def test_a_watcher_that_joins_in_mid_turn_is_told_of_each_block_once() -> None:
    async def scenario() -> None:
        store, hub = made()
        first, second = hub.watch(A), hub.watch(A)
        assert await snapshot(first) == b""
        one = write(store, A, SMALL, 1)
        assert await snapshot(second) == one.hash, "it is in the snapshot of who came after it"
        two = write(store, A, SMALL, 2)
        assert await anext(second) == BlockChange(7, 2 + 1, Tier.MEMORY, two.hash, b"")
        told = [await anext(first), await anext(first)]
        assert [event.stored for event in told if isinstance(event, BlockChange)] == [one.hash, two.hash]
        assert [event.sequence for event in told] == [2, 3]

    run(scenario)


def test_a_watcher_sees_its_own_namespace_and_the_last_state_of_a_turn() -> None:
    async def scenario() -> None:
        store, hub = made()
        watching = hub.watch(A)
        await snapshot(watching)
        write(store, B, SMALL, 9)
        block = write(store, A, SMALL, 1)
        store.drop(block)
        other = write(store, A, SMALL, 2)
        event = await anext(watching)
        assert isinstance(event, BlockChange)
        assert (event.stored, event.removed) == (other.hash, block.hash)

    run(scenario)


def test_a_watcher_that_falls_behind_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_BACKLOG", 3)

    async def scenario() -> None:
        store, hub = made()
        watching = hub.watch(A)
        await snapshot(watching)
        for number in range(5):
            hub.publish(Change(write(store, A, SMALL, number), Tier.MEMORY, stored=True))
            await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="watch again"):
            await anext(watching)

    run(scenario)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 11)), max_size=12))
def test_what_changes_while_a_snapshot_is_told_is_right_in_the_end(changes: list[tuple[int, bool, int]]) -> None:
    async def scenario() -> None:
        store, hub = made()
        for number in range(8):
            write(store, A, SMALL, number)
        space = store.namespaces[A]
        with mock.patch.object(events, "_PART_BLOCKS", 3):
            watching, known, part = hub.watch(A), set[bytes](), 0
            while True:
                event = await anext(watching)
                assert isinstance(event, Snapshot)
                known |= {event.hashes[at : at + 32] for at in range(0, len(event.hashes), 32)}
                if event.last:
                    break
                for when, stored, number in changes:
                    block = space.blocks.get(bytes([number]) * 32)
                    if when == part and stored and block is None:
                        write(store, A, SMALL, number)
                    elif when == part and not stored and block is not None:
                        store.drop(block)
                await asyncio.sleep(0)
                part += 1
        await asyncio.sleep(0)
        last = write(store, A, SMALL, 31)
        while last.hash not in known:
            event = await anext(watching)
            assert isinstance(event, BlockChange)
            for names, apply in ((event.removed, known.discard), (event.stored, known.add)):
                for at in range(0, len(names), 32):
                    apply(names[at : at + 32])
        assert known == set(space.blocks)

    run(scenario)
