"""Moves pages: copies at the head of a step; between pages and slots in both directions beside the steps."""

from __future__ import annotations

import time
from collections.abc import Sequence

from katydid_kernels import kv_pack, kv_unpack

from katydid_engine.collectives import Collectives
from katydid_engine.kv_cache import KvCache
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.plan import Moved, PageCopy, StepPlan
from katydid_engine.slot_memory import SlotMemory
from katydid_engine.transfer_queue import TransferQueue

__all__ = ["PageMover"]

# How long a step without runs looks for the end of a transfer: as long as a message may wait for it.
_PATIENCE_S = 0.001
_LOOK_S = 0.00005


class PageMover:
    """Of one rank; ``slots`` is None without a cache service."""

    def __init__(self, model: DecoderLM, kv_cache: KvCache, collectives: Collectives, slots: SlotMemory | None) -> None:
        self._kv_cache = kv_cache
        self._packs = TransferQueue(kv_pack, model, kv_cache, collectives, slots, by_layers=False)
        self._unpacks = TransferQueue(kv_unpack, model, kv_cache, collectives, slots, by_layers=True)
        if slots is not None:
            slots.before_drop = self.drain

    def start(self, plan: StepPlan) -> None:
        """Copies pages and begins a step's transfers; its runs come behind it on the current stream."""
        if plan.copies:
            self._copy(plan.copies)
        self._packs.start(plan.number, plan.packs)
        self._unpacks.start(plan.number, plan.unpacks)
        self._kv_cache.coming.clear()
        if plan.waits:
            self._kv_cache.coming.update(self._unpacks.coming())

    def join(self) -> None:
        """To be called behind a step's own work, by all ranks in the same order."""
        self._packs.join()
        self._unpacks.join()

    def over(self, plan: StepPlan) -> tuple[tuple[Moved, ...], tuple[Moved, ...]]:
        """Packs and unpacks that have ended; to be asked when the step's own work is done."""
        until = time.monotonic() + (0.0 if plan.runs else _PATIENCE_S)
        while True:
            packed = self._packs.over(plan.number, wait=False)
            unpacked = self._unpacks.over(plan.number, wait=plan.waits)
            if packed or unpacked or not self.busy or time.monotonic() >= until:
                return packed, unpacked
            time.sleep(_LOOK_S)

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        sources = [copy.source for copy in copies]
        targets = [copy.target for copy in copies]
        for pages in (*self._kv_cache.k_pages, *self._kv_cache.v_pages):
            pages[targets] = pages[sources]

    @property
    def busy(self) -> bool:
        """Whether transfers are under way whose end was not told yet."""
        return bool(self._packs or self._unpacks)

    def drain(self) -> None:
        """Waits until none is under way on the device."""
        self._packs.drain()
        self._unpacks.drain()
