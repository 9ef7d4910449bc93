"""Moves pages at the head of a step: packs them into slots, copies them, unpacks slots into them, in this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from katydid_kernels import kv_pack, kv_unpack, published_checksum
from torch import Tensor

from katydid_engine.collectives import Collectives
from katydid_engine.kv_cache import KvCache
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.plan import PageCopy, StepPlan, Transfer
from katydid_engine.slot_memory import SlotMemory

__all__ = ["PageMover", "published_checksums"]


class PageMover:
    """Of one rank; ``slots`` is None without a cache service."""

    def __init__(self, model: DecoderLM, kv_cache: KvCache, collectives: Collectives, slots: SlotMemory | None) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._collectives = collectives
        self._slots = slots

    def move(self, plan: StepPlan) -> Tensor | None:
        """Moves pages; the linear checksums of packs, then of unpacks, int64 ``[transfers]``; None without any."""
        packed = self._transfer(kv_pack, plan.packs)
        if plan.copies:
            self._copy(plan.copies)
        unpacked = self._transfer(kv_unpack, plan.unpacks)
        if not (plan.packs or plan.unpacks):
            return None
        sums = torch.cat((packed, unpacked))
        if not self._model.sums_kv_heads:
            sums.zero_()
        # The sum over ranks is that of the whole object. Rank 0 tells the face that slots are full or free: every rank
        # must be done with its heads by then, summed or not.
        return self._collectives.all_reduce(sums)

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        sources = [copy.source for copy in copies]
        targets = [copy.target for copy in copies]
        for pages in (*self._kv_cache.k_pages, *self._kv_cache.v_pages):
            pages[targets] = pages[sources]

    def _transfer(self, move: Callable[..., None], transfers: Sequence[Transfer]) -> Tensor:
        """Carries out transfers; this rank's part of their checksums, int64 ``[transfers]``."""
        device = self._model.device
        sums = torch.zeros(len(transfers), dtype=torch.int64, device=device)
        if not transfers:
            return sums
        assert self._slots is not None
        for objects, places in self._slots.groups(transfers):
            some = [transfers[place] for place in places]
            part = sums.new_zeros(len(some)) if any(transfer.summed for transfer in some) else None
            move(
                self._kv_cache.k_pages,
                self._kv_cache.v_pages,
                torch.tensor([transfer.page for transfer in some], dtype=torch.int32).to(device),
                objects,
                torch.tensor([self._slots.row(transfer.slot) for transfer in some], dtype=torch.int32).to(device),
                object_kv_heads=self._model.config.num_kv_heads,
                first_head=self._model.first_kv_head,
                checksums=part,
            )
            if part is not None:
                sums[places] = part
        return sums


def published_checksums(sums: Sequence[int], transfers: Sequence[Transfer]) -> tuple[int, ...]:
    """As they are told: 0 for transfers that were not to be summed."""
    return tuple(published_checksum(total) * of.summed for total, of in zip(sums, transfers, strict=True))
