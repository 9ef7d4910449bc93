"""Blocks written and read where they are, in the service's shared memory: no copy, no frame, only slots in calls.

    reservation = await cache.in_place.reserve(hashes)
    for slot, payload in zip(reservation.slots, payloads):
        if slot is not None:
            cache.in_place.view(slot)[:] = payload
    await cache.in_place.commit(reservation, checksums)

    found = await cache.lookup(hashes)                       # the lease keeps the slots
    use(cache.in_place.view(found.slots[0]))
    await cache.release(found.lease)

Whoever reads in place checks the bytes against `slot.checksum` (xxh3-128) before relying on them: `intact` does.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.block_hash import HASH_BYTES
from katydid_runtime.duration import to_duration
from katydid_runtime.errors import InvalidRequestError, UnavailableError
from xxhash import xxh3_128_digest

from katydid_cache.arena import ArenaMapping
from katydid_cache.arena_slots import CHECKSUM_BYTES, NO_SLOT, SLOT, ArenaSlot
from katydid_cache.asking import signed
from katydid_cache.layout import Span
from katydid_cache.records import Durability, PutOutcome, PutRefusal, PutStatus

__all__ = ["GIVEN_UP", "NOT_WRITTEN", "Answer", "InPlace", "Reservation"]

GIVEN_UP = bytes(CHECKSUM_BYTES)
"""Checksum to commit for a slot that was not written after all."""

NOT_WRITTEN = 0
"""Linear checksum to commit for one."""

_UNANSWERED = PutOutcome(PutStatus.REFUSED, PutRefusal.STORE_UNAVAILABLE)

T = TypeVar("T")


class Answer(Protocol):
    """How the client calls the service: with its attachment, or `missed()` where it degrades."""

    def __call__(self, call: Callable[[int], Awaitable[T]], missed: Callable[[], T]) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots to write, one a hash; None where there is nothing to write. `declined` says why, by index of the hash."""

    id: int
    slots: tuple[ArenaSlot | None, ...]
    declined: Mapping[int, PutOutcome] = field(default_factory=dict)


class InPlace:
    """The shared-memory side of a client that attached with `arena=True`."""

    def __init__(self, stub: Any, answer: Answer, mapping: Callable[[], ArenaMapping | None], size: int) -> None:
        self._stub = stub
        self._answer = answer
        self._mapping = mapping
        self._size = size

    @property
    def mapping(self) -> ArenaMapping | None:
        """The memory mapped now: None without an arena; a new one after every re-attachment."""
        return self._mapping()

    def view(self, slot: ArenaSlot) -> memoryview:
        """The block's bytes in the arena, writable. Raises UnavailableError when there is no arena (any more)."""
        mapping = self._mapping()
        if mapping is None or slot.offset + self._size > mapping.bytes:
            raise UnavailableError("the slot is not in the memory that is mapped now")
        return mapping.view[slot.offset : slot.offset + self._size]

    def intact(self, slot: ArenaSlot) -> bool:
        """Whether a slot found by a lookup holds the bytes that were committed."""
        return xxh3_128_digest(self.view(slot)) == slot.checksum

    async def reserve(
        self,
        hashes: bytes,
        *,
        parents: bytes = b"",
        heads: Span = Span(),
        tenant: bytes = b"",
        hold_s: float | None = None,
        timeout_s: float = 1.0,
    ) -> Reservation:
        """Slots for the blocks `hashes` (packed). Without `parents` (packed) all are first blocks.

        The slots are the caller's for two minutes: what is written there later falls into others' blocks, which their
        checksums tell. `hold_s` keeps the blocks at least so long once they are committed, and those present from now
        on.
        """
        count = len(hashes) // HASH_BYTES

        async def call(attachment: int) -> Reservation:
            request = pb.ReserveRequest(
                attachment=attachment,
                hashes=hashes,
                parents=parents or bytes(HASH_BYTES * count),
                heads=pb.HeadRange(first=heads.first, count=heads.count),
                tenant=tenant,
            )
            if hold_s is not None:
                request.hold.CopyFrom(to_duration(hold_s))
            response = await self._stub.Reserve(signed(request), timeout=timeout_s)
            slots = tuple(
                None if offset == NO_SLOT else ArenaSlot(offset, generation)
                for offset, generation in SLOT.iter_unpack(response.slots)
            )
            declined = {result.index: _outcome(result.status, result.refusal) for result in response.declined}
            return Reservation(response.reservation, slots, declined)

        missed = Reservation(0, (None,) * count, dict.fromkeys(range(count), _UNANSWERED))
        return await self._answer(call, lambda: missed)

    async def commit(
        self,
        reservation: Reservation,
        checksums: Sequence[bytes] = (),
        *,
        linear_checksums: Sequence[int] = (),
        durability: Durability = Durability.MEMORY,
        ttl_s: float | None = None,
        sliding: bool = False,
        timeout_s: float = 30.0,
    ) -> list[PutOutcome]:
        """Make written slots visible; one outcome for each slot that was given, in order.

        `checksums` holds the xxh3-128 (16 bytes) of the reserved heads' runs of each of these slots, GIVEN_UP for those
        not written; or, of whole blocks, `linear_checksums` the 64-bit linear ones that an engine made while it packed,
        NOT_WRITTEN for those not written.
        """
        taken = sum(slot is not None for slot in reservation.slots)
        given = len(checksums) + len(linear_checksums)
        if given != taken or (checksums and linear_checksums) or any(len(c) != CHECKSUM_BYTES for c in checksums):
            raise InvalidRequestError(
                f"{given} checksums for {taken} slots",
                field="checksums",
                value=given,
                allowed=f"{taken} of {CHECKSUM_BYTES} bytes, or {taken} linear ones",
            )
        if not taken:
            return []

        async def call(attachment: int) -> list[PutOutcome]:
            request = pb.CommitRequest(
                attachment=attachment,
                reservation=reservation.id,
                checksums=b"".join(checksums),
                linear_checksums=struct.pack(f"<{len(linear_checksums)}Q", *linear_checksums),
                durability=pb.Durability.ValueType(durability),
            )
            if ttl_s is not None:
                request.ttl.CopyFrom(to_duration(ttl_s))
                request.sliding = sliding
            response = await self._stub.Commit(request, timeout=timeout_s)
            return [_outcome(*pair) for pair in zip(response.statuses, response.refusals, strict=True)]

        return await self._answer(call, lambda: [_UNANSWERED] * taken)


def _outcome(status: int, refusal: int) -> PutOutcome:
    parsed = PutStatus(status)
    return PutOutcome(parsed, PutRefusal(refusal) if parsed is PutStatus.REFUSED else None)
