"""Watchers of block events: a snapshot that the deltas continue exactly, and an end for those that do not keep up."""

from __future__ import annotations

import asyncio

import pytest
from katydid_engine import block_watch
from katydid_engine.block_pool import BlockEvents
from katydid_engine.block_watch import BlockWatch
from katydid_runtime.errors import OverloadedError


def name(block: int) -> bytes:
    return block.to_bytes(32, "big")


def test_snapshot_in_parts_then_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_watch, "_SNAPSHOT_HASHES", 2)

    async def scenario() -> None:
        watch = BlockWatch("boot", 2)
        watch.apply(0, BlockEvents((name(1), name(2), name(3)), ()))
        watch.apply(0, BlockEvents((), (name(2),)))
        watch.apply(0, BlockEvents((name(4),), ()))
        stream = watch.stream()
        first = await anext(stream)
        watch.apply(1, BlockEvents((name(9),), (name(8),)))
        events = [first, *[await anext(stream) for _ in range(3)]]
        assert [event.sequence for event in events] == [1, 2, 3, 4]
        assert [(e.snapshot.dp_rank, e.snapshot.hashes, e.snapshot.last) for e in events[:3]] == [
            (0, name(1) + name(3), False),
            (0, name(4), False),
            (1, b"", True),
        ]
        delta = events[3].delta
        assert (delta.dp_rank, delta.stored, delta.removed) == (1, name(9), name(8))
        await stream.aclose()

    asyncio.run(scenario())


def test_a_watcher_that_falls_behind_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_watch, "_QUEUE_EVENTS", 3)

    async def scenario() -> None:
        watch = BlockWatch("boot", 1)
        stream = watch.stream()
        await anext(stream)
        for block in range(9):
            watch.apply(0, BlockEvents((name(block),), ()))
        with pytest.raises(OverloadedError):
            await anext(stream)

    asyncio.run(scenario())
