"""Blocks written and read where they are, in the service's shared memory: no copy, no frame, only slots over gRPC.

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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.block_hash import HASH_BYTES
from katydid_runtime.duration import to_duration
from katydid_runtime.errors import InvalidRequestError, UnavailableError
from xxhash import xxh3_128_digest

from katydid_cache.arena import ArenaMapping
from katydid_cache.layout import Span
from katydid_cache.records import ArenaSlot, Durability, PutStatus

__all__ = ["InPlace", "Reservation", "unpack_slots"]

_SLOT = struct.Struct("<QQ")
_NO_SLOT = 2**64 - 1
_CHECKSUM_BYTES = 16

T = TypeVar("T")


class Answer(Protocol):
    """How the client calls the service: with its attachment, or `missed()` where it degrades."""

    def __call__(self, call: Callable[[int], Awaitable[T]], missed: Callable[[], T]) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots to write, one a hash; None where there is nothing to write: the block is there, busy, or has no room."""

    id: int
    slots: tuple[ArenaSlot | None, ...]


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
        self, hashes: bytes, *, parents: bytes = b"", heads: Span = Span(), tenant: bytes = b"", timeout_s: float = 1.0
    ) -> Reservation:
        """Slots for the blocks `hashes` (packed). Without `parents` (packed) all are first blocks."""
        count = len(hashes) // HASH_BYTES

        async def call(attachment: int) -> Reservation:
            request = pb.ReserveRequest(
                attachment=attachment,
                hashes=hashes,
                parents=parents or bytes(HASH_BYTES * count),
                heads=pb.HeadRange(first=heads.first, count=heads.count),
                tenant=tenant,
            )
            response = await self._stub.Reserve(request, timeout=timeout_s)
            slots = (
                None if offset == _NO_SLOT else ArenaSlot(offset, generation, b"")
                for offset, generation in _SLOT.iter_unpack(response.slots)
            )
            return Reservation(response.reservation, tuple(slots))

        return await self._answer(call, lambda: Reservation(0, (None,) * count))

    async def commit(
        self,
        reservation: Reservation,
        checksums: Sequence[bytes],
        *,
        durability: Durability = Durability.MEMORY,
        ttl_s: float | None = None,
        timeout_s: float = 30.0,
    ) -> list[PutStatus]:
        """Make written slots visible; one status for each slot that was given, in order.

        `checksums` holds the xxh3-128 (16 bytes) of the reserved heads' runs of each of these slots.
        """
        taken = sum(slot is not None for slot in reservation.slots)
        if len(checksums) != taken or any(len(checksum) != _CHECKSUM_BYTES for checksum in checksums):
            raise InvalidRequestError(
                f"{len(checksums)} checksums for {taken} slots",
                field="checksums",
                value=len(checksums),
                allowed=f"{taken} of {_CHECKSUM_BYTES} bytes",
            )
        if not taken:
            return []

        async def call(attachment: int) -> list[PutStatus]:
            request = pb.CommitRequest(
                attachment=attachment,
                reservation=reservation.id,
                checksums=b"".join(checksums),
                durability=pb.Durability.ValueType(durability),
            )
            if ttl_s is not None:
                request.ttl.CopyFrom(to_duration(ttl_s))
            response = await self._stub.Commit(request, timeout=timeout_s)
            return [PutStatus(status) for status in response.statuses]

        return await self._answer(call, lambda: [PutStatus.REFUSED] * taken)


def unpack_slots(slots: bytes, checksums: bytes) -> tuple[ArenaSlot, ...]:
    """The slots of a LookupResponse."""
    return tuple(
        ArenaSlot(offset, generation, checksums[_CHECKSUM_BYTES * index : _CHECKSUM_BYTES * (index + 1)])
        for index, (offset, generation) in enumerate(_SLOT.iter_unpack(slots))
    )
