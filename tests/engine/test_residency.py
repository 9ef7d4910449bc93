"""Pages for a waiting sequence: given as soon as they are there, and a long chain is not matched at every try."""

from __future__ import annotations

from array import array

import pytest
from katydid_engine.block_pool import BlockPool
from katydid_engine.kv_traffic import KvTraffic
from katydid_engine.request import LiveRequest, Request, Sequence
from katydid_engine.residency import Residency
from katydid_runtime.block_hash import ChainKey


class CountingPool(BlockPool):
    """Counts matches."""

    matches = 0

    def match(self, hashes: list[bytes]) -> list[int]:  # type: ignore[override]
        self.matches += 1
        return super().match(hashes)


@pytest.fixture
def queues() -> Residency:
    return Residency(CountingPool(8), KvTraffic(range(0)))


def sequence(id: int, blocks: int, first_token: int = 0) -> Sequence:
    tokens = array("I", (first_token + position for position in range(64 * blocks)))
    return Sequence(id, LiveRequest(Request(id, tokens, ChainKey(b"m" * 32)), id))


def admit(queues: Residency, one: Sequence) -> Sequence:
    queues.enqueue(one)
    assert queues.take_pages(one, 0)
    queues.run(one)
    return one


def test_one_that_does_not_fit_is_matched_again_when_enough_came_free(queues: Residency) -> None:
    pool = queues.pool
    assert isinstance(pool, CountingPool)
    small, large = (admit(queues, sequence(id, blocks, 1000 * id)) for id, blocks in ((1, 2), (2, 5)))
    waiting = sequence(3, 6, 5000)
    queues.enqueue(waiting)
    assert not queues.take_pages(waiting, 0)
    before = pool.matches
    assert not any(queues.take_pages(waiting, spare) for spare in (0, 1) * 50)
    queues.leave(small)  # 3 of 6 pages
    assert not queues.take_pages(waiting, 0)
    assert pool.matches == before
    queues.leave(large)
    assert not queues.take_pages(waiting, 3), "8 of 9 pages"
    assert queues.take_pages(waiting, 2)
    assert pool.matches <= before + 2


def test_a_sequence_is_let_in_beside_what_is_to_be_spared(queues: Residency) -> None:
    waiting = sequence(1, 6)
    queues.enqueue(waiting)
    assert not queues.take_pages(waiting, 3), "6 of 8 pages leave 2"
    assert queues.take_pages(waiting, 2)
    assert queues.pool.num_available == 2


def test_blocks_that_another_finishes_count(queues: Residency) -> None:
    """Six blocks of a running chain and two free pages hold a chain of eight that begins with the six."""
    running = admit(queues, sequence(1, 6))
    waiting = sequence(2, 8)
    queues.enqueue(waiting)
    for computed in range(6):
        assert not queues.take_pages(waiting, 0)
        running.num_computed = 64 * (computed + 1)
        queues.publish(running, running.num_computed, computed=True)
    assert queues.take_pages(waiting, 0)
    assert waiting.pages[:6] == running.pages
