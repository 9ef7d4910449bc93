"""Transfers on a host, and of ranks that hold a part of the heads each: whole objects, and the sums of all ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from katydid_engine.collectives import Collectives, SingleRank
from katydid_engine.kv_cache import KvCache
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.page_mover import PageMover
from katydid_engine.plan import Moved, PageCopy, StepPlan, Transfer
from katydid_engine.slot_memory import SlotMemory
from katydid_kernels import linear_checksum, published_checksum

from tests.engine.thread_group import on_ranks

LAYERS, HEADS, HEAD_DIM, PAGES, SLOTS = 3, 4, 16, 6, 6
OBJECT_BYTES = LAYERS * HEADS * 2 * 64 * HEAD_DIM * 4
CPU = torch.device("cpu")


def rank_of(collectives: Collectives, slots: torch.Tensor, first_head: int, heads: int, *, sums: bool) -> PageMover:
    """A rank with ``heads`` heads from ``first_head`` on; value of a page's K and V: page + 10 x head."""
    shape = {"num_layers": LAYERS, "num_pages": PAGES, "num_kv_heads": heads, "head_dim": HEAD_DIM}
    cache = KvCache.allocate(**shape, dtype=torch.float32, device=CPU)
    for pages in (*cache.k_pages, *cache.v_pages):
        for page in range(PAGES):
            for head in range(heads):
                pages[page, head] = page + 10 * (first_head + head)
    model = SimpleNamespace(
        device=CPU, config=SimpleNamespace(num_kv_heads=HEADS), first_kv_head=first_head, sums_kv_heads=sums
    )
    memory = SlotMemory(slots, CPU, face=os.getpid())
    return PageMover(cast("DecoderLM", model), cache, collectives, memory)


def step(mover: PageMover, plan: StepPlan) -> tuple[tuple[Moved, ...], tuple[Moved, ...]]:
    mover.start(plan)
    mover.join()
    return mover.over(plan)


def summed(slots: torch.Tensor, slot: int) -> int:
    return published_checksum(linear_checksum(slots[slot].numpy().tobytes()))


def test_on_a_host_transfers_are_over_with_their_step() -> None:
    slots = torch.zeros((SLOTS, OBJECT_BYTES), dtype=torch.uint8)
    mover = rank_of(SingleRank(), slots, 0, HEADS, sums=True)
    packs = (Transfer(3, 0, summed=True), Transfer(1, 5), Transfer(2, 4, summed=True))
    packed, unpacked = step(mover, StepPlan(7, packs=packs))
    assert packed == (Moved(7, (summed(slots, 0), 0, summed(slots, 4))),)
    assert unpacked == ()
    assert not mover.busy
    values = slots[0].view(torch.float32).view(LAYERS, HEADS, 2, 64, HEAD_DIM)
    assert all((values[:, head] == 3 + 10 * head).all() for head in range(HEADS))
    unpacks = (Transfer(0, 4, summed=True),)
    packed, unpacked = step(mover, StepPlan(8, copies=(PageCopy(1, 5),), unpacks=unpacks, packs=(Transfer(5, 1),)))
    assert packed == (Moved(8, (0,)),)
    assert unpacked == (Moved(8, (summed(slots, 4),)),)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_a_group_tell_the_sums_of_whole_objects(ranks: int) -> None:
    """Also where two ranks hold the same head: it is counted once."""
    slots = torch.zeros((SLOTS, OBJECT_BYTES), dtype=torch.uint8)
    packs = (Transfer(3, 0, summed=True), Transfer(1, 5, summed=True))

    def work(collectives: Collectives) -> list[tuple[Moved, ...]]:
        half, sums = divmod(2 * collectives.rank, ranks)[0], collectives.rank % (ranks // 2) == 0
        mover = rank_of(collectives, slots, half * HEADS // 2, HEADS // 2, sums=sums)
        packed, _ = step(mover, StepPlan(1, packs=packs))
        _, unpacked = step(mover, StepPlan(2, unpacks=(Transfer(0, 5, summed=True),), waits=True))
        return [packed, unpacked]

    for packed, unpacked in on_ranks(ranks, work):
        assert packed == (Moved(1, (summed(slots, 0), summed(slots, 5))),)
        assert unpacked == (Moved(2, (summed(slots, 5),)),)
