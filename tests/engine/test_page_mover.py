"""Pages and slots move beside the steps of a GPU: in order with them, whole, and layer by layer where a step waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from katydid_cache import ArenaMapping
from katydid_engine.collectives import SingleRank
from katydid_engine.kv_cache import KvCache
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.page_mover import PageMover
from katydid_engine.plan import Moved, StepPlan, Transfer
from katydid_engine.slot_memory import SlotMemory
from katydid_engine.staging import arena_slot
from katydid_kernels import linear_checksum, published_checksum
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LAYERS, HEADS, HEAD_DIM, PAGES = 24, 4, 128, 96
BLOCK_BYTES = LAYERS * HEADS * 2 * 64 * HEAD_DIM
ARENA_BLOCKS = 96


class Rank:
    """A rank's pages, an arena, and who moves between them."""

    def __init__(self) -> None:
        device = torch.device("cuda", 0)
        self.cache = KvCache.allocate(
            num_layers=LAYERS,
            num_pages=PAGES,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            dtype=torch.float8_e4m3fn,
            device=device,
        )
        model = SimpleNamespace(
            device=device, config=SimpleNamespace(num_kv_heads=HEADS), first_kv_head=0, sums_kv_heads=True
        )
        self.arena = arena()
        self.slots = SlotMemory(torch.zeros((2, BLOCK_BYTES), dtype=torch.uint8), device, face=os.getpid())
        self.mover = PageMover(cast("DecoderLM", model), self.cache, SingleRank(), self.slots)
        self.step = 0

    def slot(self, block: int) -> int:
        return arena_slot(self.arena.descriptor, block * BLOCK_BYTES)

    def bytes(self, block: int) -> memoryview:
        return self.arena.view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]

    def fill(self) -> None:
        for pages in (*self.cache.k_pages, *self.cache.v_pages):
            pages.view(torch.uint8).random_(0, 256)

    def object(self, page: int) -> bytes:
        layers = (
            torch.stack((k[page].view(torch.uint8).flatten(1), v[page].view(torch.uint8).flatten(1)), dim=1)
            for k, v in zip(self.cache.k_pages, self.cache.v_pages, strict=True)
        )
        return torch.stack(list(layers)).cpu().numpy().tobytes()

    def start(self, **fields: object) -> StepPlan:
        self.step += 1
        plan = StepPlan(self.step, **fields)  # type: ignore[arg-type]
        self.mover.start(plan)
        self.mover.join()
        return plan

    def finish(self, plan: StepPlan) -> tuple[list[Moved], list[Moved]]:
        """All that is under way, in the end."""
        packed, unpacked = self.mover.over(plan)
        all_packed, all_unpacked = [*packed], [*unpacked]
        while self.mover.busy:
            packed, unpacked = self.mover.over(StepPlan(self.step))
            all_packed += packed
            all_unpacked += unpacked
        return all_packed, all_unpacked


def arena() -> ArenaMapping:
    descriptor, size = os.memfd_create("test-arena"), ARENA_BLOCKS * BLOCK_BYTES
    os.ftruncate(descriptor, size)
    try:
        return ArenaMapping(descriptor, size)
    finally:
        os.close(descriptor)


def spin(milliseconds: int) -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))  # type: ignore[no-untyped-call]


def summed(content: bytes | memoryview) -> int:
    return published_checksum(linear_checksum(content))


@pytest.fixture
def rank() -> Iterator[Rank]:
    torch.manual_seed(1)
    one = Rank()
    yield one
    torch.cuda.synchronize()
    one.slots.close()


def moves(rank: Rank, pages: range, first_slot: int = 0) -> tuple[Transfer, ...]:
    return tuple(Transfer(page, rank.slot(first_slot + n), summed=True) for n, page in enumerate(pages))


def test_blocks_leave_and_come_back_with_their_checksums(rank: Rank) -> None:
    rank.fill()
    ((packed,), none) = rank.finish(rank.start(packs=moves(rank, range(64))))
    assert none == []
    assert packed.step == 1
    for block in range(64):
        assert bytes(rank.bytes(block)) == rank.object(block)
        assert packed.checksums[block] == summed(rank.bytes(block))
    unpacks = tuple(Transfer(95 - block, rank.slot(block), summed=True) for block in range(32))
    (_, (unpacked,)) = rank.finish(rank.start(unpacks=unpacks))
    assert unpacked.checksums == packed.checksums[:32]
    assert all(rank.object(95 - block) == rank.object(block) for block in range(32))


def test_a_flipped_bit_shows(rank: Rank) -> None:
    rank.fill()
    ((packed,), _) = rank.finish(rank.start(packs=moves(rank, range(4))))
    rank.bytes(2)[77] ^= 4
    (_, (unpacked,)) = rank.finish(rank.start(unpacks=moves(rank, range(4))))
    equal = [a == b for a, b in zip(packed.checksums, unpacked.checksums, strict=True)]
    assert equal == [True, True, False, True]


def test_a_step_does_not_wait_for_what_is_under_way(rank: Rank) -> None:
    """Neither does its end: transfers are told by a later step. Of some tries the best counts, for other processes may
    have their turns on the card in between."""
    rank.fill()
    rank.finish(rank.start(packs=moves(rank, range(64))))
    shares = []
    for _ in range(8):
        begun, ended, whole = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        spin(20)  # the host launches meanwhile: what it takes is none of the step's time
        begun.record()
        plan = rank.start(unpacks=moves(rank, range(64)), runs=("a run",))
        ended.record()
        told = rank.mover.over(plan)
        rank.mover.drain()
        whole.record()
        torch.cuda.synchronize()
        assert told == ((), ())
        rank.finish(plan)
        shares.append(begun.elapsed_time(ended) / begun.elapsed_time(whole))
    assert min(shares) < 0.5


def test_packs_come_behind_the_work_that_writes_their_pages(rank: Rank) -> None:
    spin(20)
    for pages in (*rank.cache.k_pages, *rank.cache.v_pages):
        pages.view(torch.uint8).fill_(7)
    plan = rank.start(packs=moves(rank, range(8)))
    for pages in (*rank.cache.k_pages, *rank.cache.v_pages):
        assert pages.is_cuda
    rank.finish(plan)
    assert all(set(bytes(rank.bytes(block))) == {7} for block in range(8))


def test_unpacks_come_behind_the_work_that_reads_their_pages(rank: Rank) -> None:
    rank.fill()
    before = rank.object(0)
    for block in range(8):
        rank.bytes(block)[:] = bytes([block + 1]) * BLOCK_BYTES
    spin(20)
    seen = [(k[0].clone(), v[0].clone()) for k, v in zip(rank.cache.k_pages, rank.cache.v_pages, strict=True)]
    rank.finish(rank.start(unpacks=moves(rank, range(8))))
    assert b"".join(flat(k, v) for k, v in seen) == before
    assert set(rank.object(3)) == {4}


def flat(k: Tensor, v: Tensor) -> bytes:
    both = torch.stack((k.view(torch.uint8).flatten(1), v.view(torch.uint8).flatten(1)), dim=1)
    return both.cpu().numpy().tobytes()


def test_a_step_that_waits_reads_each_layer_when_it_has_come(rank: Rank) -> None:
    """Layer 0 is there before the last one is, and no layer is read too early."""
    for block in range(64):
        rank.bytes(block)[:] = bytes([block + 1]) * BLOCK_BYTES
    rank.finish(rank.start(unpacks=moves(rank, range(64))))  # compiled, registered
    for pages in (*rank.cache.k_pages, *rank.cache.v_pages):
        pages.view(torch.uint8).zero_()
    torch.cuda.synchronize()
    begun, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begun.record()
    plan = rank.start(unpacks=moves(rank, range(64)), runs=("a run",), waits=True)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    wanted = torch.arange(1, 65, device="cuda", dtype=torch.uint8)[:, None]
    for layer in range(LAYERS):
        k, v = rank.cache.layer(layer)
        if layer == 0:
            first.record()
        wrong += (k[:64].view(torch.uint8).flatten(1) != wanted).sum() + (
            v[:64].view(torch.uint8).flatten(1) != wanted
        ).sum()
    last.record()
    _, (moved,) = rank.mover.over(plan)
    assert moved.step == plan.number, "what a step has waited for is told with it"
    torch.cuda.synchronize()
    assert int(wrong) == 0
    assert begun.elapsed_time(first) < begun.elapsed_time(last) / 2


def test_a_restarted_service_has_other_memory(rank: Rank) -> None:
    """What is under way in the old one ends well; slots of both in one step are told apart."""
    rank.fill()
    for _ in range(6):
        old = rank.arena
        first = rank.start(packs=moves(rank, range(32)))
        rank.arena = arena()
        second = rank.start(packs=moves(rank, range(32, 64)))
        both = rank.start(packs=(Transfer(70, arena_slot(old.descriptor, 0)), *moves(rank, range(71, 72), 40)))
        packed, _ = rank.finish(both)
        assert [moved.step for moved in packed] == [first.number, second.number, both.number]
        assert bytes(old.view[:BLOCK_BYTES]) == rank.object(70)
        assert bytes(old.view[BLOCK_BYTES : 32 * BLOCK_BYTES]) == b"".join(map(rank.object, range(1, 32)))
        assert bytes(rank.bytes(31)) == rank.object(63)
        assert bytes(rank.bytes(40)) == rank.object(71)
