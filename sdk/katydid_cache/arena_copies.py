"""Put and Get for a client on the service's host: blocks are copied to and from its shared memory, beside the loop.

A thread copies one group of blocks while the next is being reserved and the one before is being checked by the service,
so that the calls cost no time of their own. A piece is hashed right after it was copied, while the core still has it in
its cache. Engines that have the shared memory mapped need no copy: they use `in_place` itself.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from katydid_runtime.block_hash import HASH_BYTES
from katydid_runtime.errors import UnavailableError
from xxhash import xxh3_128, xxh3_128_digest

from katydid_cache.arena import ArenaMapping
from katydid_cache.arena_slots import ArenaSlots
from katydid_cache.in_place import GIVEN_UP, InPlace, Reservation
from katydid_cache.layout import BlockLayout, Span
from katydid_cache.put_call import PutTerms
from katydid_cache.records import Buffer, Durability, PutBlock, PutOutcome, Tier, TierRun

__all__ = ["ArenaCopies"]

_GROUP_BLOCKS = 8
# Enough to keep the copying thread busy; and to fill the service's disk queue where blocks are to reach the disk.
_GROUPS_IN_FLIGHT = {Durability.MEMORY: 2, Durability.DISK: 16}
# A quarter of a second-level cache: what was copied is still there when it is hashed, and so is what the loop needs.
_PIECE_BYTES = 256 * 1024
# More leases than anyone holds at a time: what is forgotten beyond is read by stream.
_LEASES = 256

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Leased:
    """What a lookup of `hashes` found in the memory tier."""

    mapping: ArenaMapping
    hashes: bytes
    runs: Sequence[TierRun]
    slots: ArenaSlots

    @cached_property
    def index(self) -> dict[bytes, int]:
        """Index in `slots` by hash; made when the first block is read."""
        found: list[bytes] = []
        first = 0
        for run in self.runs:
            if run.tier is Tier.MEMORY:
                found += (
                    self.hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)] for at in range(first, first + run.blocks)
                )
            first += run.blocks
        return {block_hash: index for index, block_hash in enumerate(found)}


class ArenaCopies:
    """Copies whole blocks or some of their heads and layers; one thread, made when first needed."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._giving_up: set[asyncio.Task[list[PutOutcome]]] = set()
        self._leased: OrderedDict[int, _Leased] = OrderedDict()

    def remember(
        self, lease: int, mapping: ArenaMapping, hashes: bytes, runs: Sequence[TierRun], slots: ArenaSlots
    ) -> None:
        """Note what a lookup of `hashes` found in the memory tier, until `forget`."""
        self._leased[lease] = _Leased(mapping, hashes, runs, slots)
        if len(self._leased) > _LEASES:
            self._leased.popitem(last=False)

    def forget(self, lease: int) -> None:
        self._leased.pop(lease, None)

    async def put(
        self, in_place: InPlace, layout: BlockLayout, blocks: Sequence[PutBlock], terms: PutTerms
    ) -> list[PutOutcome]:
        """One outcome a block, in order; payloads hold the runs of `terms.heads`. Raises UnavailableError."""
        groups = [blocks[start : start + _GROUP_BLOCKS] for start in range(0, len(blocks), _GROUP_BLOCKS)]
        runs = layout.runs(terms.heads)
        turns = asyncio.Semaphore(_GROUPS_IN_FLIGHT[terms.durability])

        async def turn(group: Sequence[PutBlock]) -> list[PutOutcome]:
            async with turns:
                return await self._put_group(in_place, group, runs, terms)

        tasks = [asyncio.create_task(turn(group)) for group in groups]
        try:
            return [outcome for outcomes in await asyncio.gather(*tasks) for outcome in outcomes]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def get(
        self,
        lease: int,
        mapping: ArenaMapping,
        hashes: bytes,
        into: Sequence[memoryview],
        layout: BlockLayout,
        heads: Span,
        layers: Span,
    ) -> list[bool]:
        """Copy what `lease` keeps in `mapping` into the buffers; True for each block that arrived and is right.

        Raises UnavailableError once closed.
        """
        found = [False] * len(into)
        leased = self._leased.get(lease)
        if leased is None or leased.mapping is not mapping:
            return found
        runs = layout.runs(heads, layers)

        def copy(stop: threading.Event) -> None:
            for number, buffer in enumerate(into):
                index = leased.index.get(hashes[HASH_BYTES * number : HASH_BYTES * (number + 1)])
                if index is None or stop.is_set():
                    continue
                slot = leased.slots[index]
                source = _bytes(mapping.view[slot.offset : slot.offset + layout.block_bytes])
                if len(buffer) == len(source):
                    found[number] = _copy(_bytes(buffer), source) == slot.checksum
                else:
                    # A lease may run out meanwhile: a slot that holds the block after the copy held it before.
                    _gather(_bytes(buffer), source, runs)
                    found[number] = xxh3_128_digest(source.data) == slot.checksum

        await self._beside(copy)
        return found

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    async def _put_group(
        self, in_place: InPlace, group: Sequence[PutBlock], runs: Sequence[range], terms: PutTerms
    ) -> list[PutOutcome]:
        reservation = await in_place.reserve(
            b"".join(block.hash for block in group),
            parents=b"".join(block.parent or bytes(HASH_BYTES) for block in group),
            heads=terms.heads,
            tenant=terms.tenant,
            hold_s=terms.hold_s,
            timeout_s=max(0.0, terms.deadline - time.monotonic()),
        )
        checksums: list[bytes] = []

        def fill(stop: threading.Event) -> None:
            for slot, block in zip(reservation.slots, group, strict=True):
                if slot is None:
                    continue
                if stop.is_set():
                    checksums.append(GIVEN_UP)
                    continue
                target, payload = _bytes(in_place.view(slot)), _bytes(block.payload)
                if len(payload) == len(target):
                    checksums.append(_copy(target, payload))
                else:
                    _scatter(target, payload, runs)
                    checksums.append(xxh3_128_digest(payload.data))

        try:
            await self._beside(fill)
        except (asyncio.CancelledError, UnavailableError):
            self._give_up(in_place, reservation)
            raise
        timeout_s = max(0.0, terms.deadline - time.monotonic())
        committed = iter(
            await in_place.commit(
                reservation,
                checksums,
                durability=terms.durability,
                ttl_s=terms.ttl_s,
                sliding=terms.sliding,
                timeout_s=timeout_s,
            )
        )
        return [
            reservation.declined[index] if slot is None else next(committed)
            for index, slot in enumerate(reservation.slots)
        ]

    async def _beside(self, work: Callable[[threading.Event], None]) -> None:
        """Run `work(stop)` in the thread; when cancelled, tell it to stop and wait until it has.

        Raises UnavailableError once closed.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "arena-copy")
        stop = threading.Event()
        try:
            working = asyncio.get_running_loop().run_in_executor(self._thread, work, stop)
        except RuntimeError:
            raise UnavailableError("the client was closed during the call") from None
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            # The caller may use its buffers again once this returns.
            stop.set()
            await asyncio.wait([working])
            raise

    def _give_up(self, in_place: InPlace, reservation: Reservation) -> None:
        taken = sum(slot is not None for slot in reservation.slots)
        task = asyncio.create_task(in_place.commit(reservation, [GIVEN_UP] * taken))
        self._giving_up.add(task)
        task.add_done_callback(self._given_up)

    def _given_up(self, task: asyncio.Task[list[PutOutcome]]) -> None:
        self._giving_up.discard(task)
        if not task.cancelled():
            task.exception()  # a service that cannot be told has dropped the reservation with the attachment


def _bytes(buffer: Buffer) -> Bytes:
    return np.frombuffer(buffer, dtype=np.uint8)


def _copy(target: Bytes, source: Bytes) -> bytes:
    """Copy, and give xxh3-128 of what arrived."""
    state = xxh3_128()
    for at in range(0, len(target), _PIECE_BYTES):
        piece = target[at : at + _PIECE_BYTES]
        np.copyto(piece, source[at : at + _PIECE_BYTES])
        state.update(piece.data)
    return state.digest()


def _scatter(target: Bytes, payload: Bytes, runs: Sequence[range]) -> None:
    at = 0
    for run in runs:
        target[run.start : run.stop] = payload[at : at + len(run)]
        at += len(run)


def _gather(target: Bytes, source: Bytes, runs: Sequence[range]) -> None:
    at = 0
    for run in runs:
        target[at : at + len(run)] = source[run.start : run.stop]
        at += len(run)
