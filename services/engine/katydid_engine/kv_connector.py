"""The engine's way to the KV-cache service: the face looks up, reads and writes blocks for its workers.

A worker asks with a ticket and goes on computing. The chain is looked up under one lease, and blocks are read in
windows: where the service shares its memory they are unpacked by the worker from where they lie, which checks them on
the way, and the lease ends when it has; otherwise they come in a stream into read slots of the staging buffer. Finished
blocks go the other way, in batches: packed by the worker into slots of that memory, or into write slots of the buffer.
When the service is away, lookups find nothing and blocks are given up; it is asked again once it is back. Every ticket
is answered to its end, whatever happens here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from katydid_cache import NOT_WRITTEN, Asker, Cache, LookupResult, PutBlock, asking
from katydid_cache import Tier as CacheTier
from katydid_runtime.block_hash import BLOCK_TOKENS, HASH_BYTES, RUN_BLOCKS
from katydid_runtime.trace_context import TraceContext

from katydid_engine.arena_reads import ArenaReads, Window
from katydid_engine.arena_writes import ArenaWrites
from katydid_engine.engine_metrics import EngineMetrics
from katydid_engine.faults import FaultDelays
from katydid_engine.fetch_advice import Advice, FetchAdvice
from katydid_engine.messages import (
    KvArrived,
    KvAsk,
    KvCancel,
    KvCorrupt,
    KvFound,
    KvGiveUp,
    KvLookup,
    KvReadSlotsFree,
    KvReserve,
    KvStore,
    KvWriteSlotsFree,
    SetKv,
    ToWorker,
)
from katydid_engine.phase_spans import CacheSpans
from katydid_engine.request import Tier
from katydid_engine.staging import Staging, arena_place

__all__ = ["KvConnector"]


_STREAM_BLOCKS = 32
_BATCH_BLOCKS = 32
_LOOKUP_HASHES = 4096
# How often blocks that another engine computes are looked for: while they come, and at the least; and how many.
_COMING_POLL_S = 0.03
_COMING_SELDOM_S = 0.25
_COMING_HASHES = 256
# A window that takes longer than this is better computed.
_READ_TIMEOUT_S = 5.0
_ATTACHED_POLL_S = 0.2
_TIERS = {CacheTier.MEMORY: Tier.MEMORY, CacheTier.DISK: Tier.DISK, CacheTier.SHARED: Tier.SHARED}

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Told:
    """What a worker has heard of a ticket: whether anything was found, and that no more will come."""

    found: bool = False
    ended: bool = False


class KvConnector:
    """Serves one worker group, which was told last that the service is ``attached`` or not.

    ``client`` degrades: it never raises because the service is away. ``prefill_speed`` gives the tokens per second
    that the workers compute, against which fetching is weighed; 0 where everything is to be fetched. Workers are told
    of at most ``in_place_blocks`` at a time that lie in the service's memory, by default of as many as can be read.
    """

    def __init__(
        self,
        client: Cache,
        staging: Staging,
        send: Callable[[ToWorker], None],
        metrics: EngineMetrics,
        faults: FaultDelays,
        prefill_speed: Callable[[], float] = lambda: 0.0,
        in_place_blocks: int | None = None,
    ) -> None:
        self.attached = False
        self._client = client
        self._staging = staging
        self._send = send
        self._metrics = metrics
        self._faults = faults
        self._free_slots = list(staging.shape.reading)
        self._prefill_speed = prefill_speed
        self._advice = FetchAdvice(BLOCK_TOKENS)
        limit = in_place_blocks or staging.shape.read_slots
        self._in_place = ArenaReads(client, staging.shape.slot_bytes, limit=limit)
        self._writes = ArenaWrites(client, send, metrics)
        self._slots_freed = asyncio.Event()
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._stores: asyncio.Queue[KvStore] = asyncio.Queue()
        self._reports: set[asyncio.Task[int]] = set()
        self._endings: set[asyncio.Task[None]] = set()

    def ask(self, ask: KvAsk, spans: CacheSpans = CacheSpans()) -> None:
        """Takes a worker's wish; the service's spans for it go under ``spans``. Never waits."""
        match ask:
            case KvLookup():
                with asking(Asker(ask.tenant)):
                    task = asyncio.create_task(self._fetch(ask, spans))
                self._fetches[ask.ticket] = task
                task.add_done_callback(lambda _: self._fetches.pop(ask.ticket, None))
            case KvCancel(ticket):
                if (fetch := self._fetches.get(ticket)) is not None:
                    fetch.cancel()
            case KvReadSlotsFree(slots):
                self._give_back(self._in_place.unpacked(slots))
            case KvReserve():
                self._writes.reserve(ask)
            case KvStore(slot) if arena_place(slot) is not None:
                self._writes.settle(slot, ask.checksum)
            case KvGiveUp(slots):
                for slot in slots:
                    self._writes.settle(slot, NOT_WRITTEN)
            case KvCorrupt(block, tenant):
                with asking(Asker(tenant)):
                    self._report(block)
            case KvStore():
                self._stores.put_nowait(ask)

    async def run(self) -> None:
        """Writes blocks, and tells the worker whether the service can be asked, until cancelled."""
        try:
            await asyncio.gather(self._follow_attachment(), self._write(), self._writes.run())
        finally:
            fetches = list(self._fetches.values())
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)
            for ending in self._endings:
                ending.cancel()

    async def _follow_attachment(self) -> None:
        while True:
            if self.attached != self._client.attached:
                self.attached = self._client.attached
                self._send(SetKv(self.attached, self.attached and self._writes.possible))
                self._metrics.kv_attached.set(self.attached)
                logger.info("the cache service is %s", "attached" if self.attached else "away")
            await asyncio.sleep(_ATTACHED_POLL_S)

    async def _fetch(self, ask: KvLookup, spans: CacheSpans) -> None:
        """Looks up and reads; where another engine computes the blocks, again until all have come or time is over."""
        told = _Told()
        until = time.monotonic() + ask.coming_s
        hashes, before = ask.hashes[: HASH_BYTES * _LOOKUP_HASHES], ask.before
        pause_s = 0.0
        try:
            await asyncio.sleep(self._faults.lookup)
            while not told.ended:
                last = time.monotonic() >= until
                got = HASH_BYTES * await self._fetch_there(ask, hashes, before, spans, told, last=last)
                joined = before + hashes[:got]
                before = joined[len(joined) - len(joined) % (HASH_BYTES * RUN_BLOCKS) :]
                hashes = hashes[got:]
                pause_s = _COMING_POLL_S if got or not pause_s else min(1.5 * pause_s, _COMING_SELDOM_S)
                if not told.ended and got < HASH_BYTES * _COMING_HASHES:
                    await asyncio.sleep(min(pause_s, max(0.0, until - time.monotonic())))
        except Exception:
            logger.exception("fetch failed", extra={"ticket": ask.ticket})
        finally:
            if not told.found:
                self._send(KvFound(ask.ticket, ()))
            elif not told.ended:
                self._send(KvArrived(ask.ticket, (), last=True))

    async def _fetch_there(
        self, ask: KvLookup, hashes: bytes, before: bytes, spans: CacheSpans, told: _Told, *, last: bool
    ) -> int:
        """Reads those of the blocks that are there; how many. The ticket ends with them when all of them are, and with
        ``last`` in any case."""
        found = LookupResult()
        try:
            asked = hashes if last else hashes[: HASH_BYTES * _COMING_HASHES]
            # A span of the first round alone: there may be thousands.
            trace = None if told.found else spans.lookup()
            found = await self._client.lookup(asked, before=before, trace=trace)
            advice = self._advice.advise(found.runs, self._prefill_speed(), time.monotonic())
            # What another engine has computed for this request is taken from it whatever it costs.
            if not ask.coming_s:
                found = self._weighed(found, advice, spans)
            last = last or HASH_BYTES * found.blocks == len(hashes)
            if found.blocks or not told.found:
                runs = tuple((_TIERS[run.tier], run.blocks) for run in found.runs if run.blocks)
                self._send(KvFound(ask.ticket, runs, more=not last))
                told.ended = last and not (found.blocks or told.found)
                told.found = True
            if found.blocks:
                started = time.monotonic()
                whole = await self._read(ask, hashes, found, spans, last=last)
                told.ended = last or not whole
                if advice.compute_s:
                    self._metrics.kv_saved.inc(max(0.0, advice.compute_s - (time.monotonic() - started)))
            elif last and not told.ended:
                self._send(KvArrived(ask.ticket, (), last=True))
                told.ended = True
            return found.blocks
        finally:
            if found.lease:
                # Not here: a fetch that is cancelled must end its lease too, and not before workers are done.
                ending = asyncio.create_task(self._end(ask.ticket, found.lease))
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)

    async def _end(self, ticket: int, lease: int) -> None:
        await self._in_place.all_unpacked(ticket)
        await self._client.release(lease)

    def _weighed(self, found: LookupResult, advice: Advice, spans: CacheSpans) -> LookupResult:
        """What of ``found`` is to be fetched; the decision is counted and noted at the lookup's span."""
        self._metrics.kv_advised.labels("fetch").inc(advice.blocks * BLOCK_TOKENS)
        self._metrics.kv_advised.labels("compute").inc((found.blocks - advice.blocks) * BLOCK_TOKENS)
        spans.attributes.update(
            {
                "kvcache.blocks.found": found.blocks,
                "kvcache.blocks.advised": advice.blocks,
                "kvcache.fetch.expected_ms": round(1e3 * advice.fetch_s, 3),
                "kvcache.compute.expected_ms": round(1e3 * advice.compute_s, 3),
            }
        )
        if advice.blocks == found.blocks:
            return found
        runs, left = [], advice.blocks
        for run in found.runs:
            runs.append(run._replace(blocks=min(run.blocks, left)))
            left -= runs[-1].blocks
        return dataclasses.replace(found, blocks=advice.blocks, runs=tuple(run for run in runs if run.blocks))

    async def _read(self, ask: KvLookup, hashes: bytes, found: LookupResult, spans: CacheSpans, *, last: bool) -> bool:
        """Windows of blocks in order, each of one tier, until all are read, or one is missing: then the ticket ends, as
        with ``last``. Whether none was missing."""
        lying = self._in_place.found(found)
        ends = accumulate((run.blocks for run in found.runs), initial=0)
        for (run_start, run_end), (tier, *_) in zip(pairwise(ends), found.runs, strict=True):
            first = run_start
            while first < run_end:
                left = run_end - first
                count = min(_STREAM_BLOCKS, left) if lying is None else self._in_place.reach(lying, left)
                wanted = hashes[HASH_BYTES * first : HASH_BYTES * (first + count)]
                if lying is not None:
                    await asyncio.sleep(self._faults.fetch)
                    window = await self._in_place.window(ask.ticket, lying, wanted, _READ_TIMEOUT_S)
                else:
                    window, count = await self._stream(found.lease, wanted, spans.fetch(run_start))
                self._advice.note(tier, len(window.slots), window.read_s, time.monotonic())
                first += len(window.slots)
                short = len(window.slots) < count
                final = short or (last and first == found.blocks)
                self._send(KvArrived(ask.ticket, tuple(window.slots), final, tuple(window.checksums)))
                if short:
                    return False
        return True

    async def _stream(self, lease: int, hashes: bytes, trace: TraceContext | None) -> tuple[Window, int]:
        """Read slots with as many of the blocks as there are slots and right blocks; and how many were asked for."""
        slots = await self._take_slots(len(hashes) // HASH_BYTES)
        valid = 0
        try:
            await asyncio.sleep(self._faults.fetch)
            into = [self._staging.slot(slot) for slot in slots]
            hashes = hashes[: HASH_BYTES * len(slots)]
            started = time.monotonic()
            got = await self._client.get(lease, hashes, into=into, trace=trace, timeout_s=_READ_TIMEOUT_S)
            valid = got.prefix
        finally:
            self._give_back(slots[valid:])
        return Window(slots[:valid], (), time.monotonic() - started), len(slots)

    def _report(self, block: bytes) -> None:
        """Tells the service of a block that was wrong when it was unpacked."""
        self._metrics.kv_corrupt.inc()
        logger.warning("a block was wrong when it was unpacked", extra={"block": block.hex()[:16]})
        task = asyncio.create_task(self._client.report(block))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _write(self) -> None:
        while True:
            batch = [await self._stores.get()]
            while len(batch) < _BATCH_BLOCKS and not self._stores.empty():
                batch.append(self._stores.get_nowait())
            for group in _alike(batch):
                await self._put(group)

    async def _put(self, group: Sequence[KvStore]) -> None:
        try:
            blocks = [PutBlock(store.hash, store.parent, self._staging.slot(store.slot), store.run) for store in group]
            outcomes = await self._client.put(blocks, tenant=group[0].tenant, hold_s=group[0].hold_s)
            for outcome in outcomes:
                what = outcome.status if outcome.refusal is None else outcome.refusal
                self._metrics.kv_stored.labels(what.name.lower()).inc()
        except Exception:
            logger.exception("write-back failed", extra={"blocks": len(group)})
        finally:
            self._send(KvWriteSlotsFree(tuple(store.slot for store in group)))

    async def _take_slots(self, wanted: int) -> list[int]:
        """At least one read slot, ``wanted`` at most; waits while none is free."""
        while not self._free_slots:
            self._slots_freed.clear()
            await self._slots_freed.wait()
        taken = self._free_slots[:wanted]
        del self._free_slots[:wanted]
        return taken

    def _give_back(self, slots: Sequence[int]) -> None:
        self._free_slots += slots
        self._slots_freed.set()


def _alike(batch: Sequence[KvStore]) -> list[list[KvStore]]:
    """Blocks that can be written by one call: of one tenant, with one hold time."""
    groups: dict[tuple[bytes, float | None], list[KvStore]] = {}
    for store in batch:
        groups.setdefault((store.tenant, store.hold_s), []).append(store)
    return list(groups.values())
