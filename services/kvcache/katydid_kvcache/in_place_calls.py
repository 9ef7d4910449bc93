"""Reserve, Commit and what lookups tell of the shared memory: the calls of clients that read and write in place."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache.arena_slots import CHECKSUM_BYTES, NO_SLOT, SLOT
from katydid_cache.records import Durability, PutRefusal, PutStatus
from katydid_runtime.errors import InvalidRequestError, UnsupportedError

from katydid_kvcache import requests
from katydid_kvcache.attachments import Attachment
from katydid_kvcache.blocks import ROW, Block
from katydid_kvcache.cache import Cache
from katydid_kvcache.policy.lifetimes import Keep
from katydid_kvcache.slabs import SlabAllocator
from katydid_kvcache.store import Refusal, Write
from katydid_kvcache.writing import Claim, commit

__all__ = ["PackedSlots", "commit_in_place", "reserve_in_place"]

_NOTHING = SLOT.pack(NO_SLOT, 0)
_LINEAR = struct.Struct("<Q")


class PackedSlots:
    """Blocks as the protocol packs them: slots, xxh3-128 checksums, and linear ones if there are any.

    `rows` has the ROW of each, back to back.
    """

    def __init__(self, rows: bytes) -> None:
        columns = np.frombuffer(rows, dtype="<u8").reshape(-1, ROW.size // 8)
        self.slots = columns[:, :2].tobytes()
        self.checksums = columns[:, 2:4].tobytes()
        linear = columns[:, 4]
        self.linear_checksums = linear.tobytes() if linear.any() else b""


def _with_arena(cache: Cache, attachment_id: int) -> Attachment:
    """The attachment. Raises UnsupportedError when it has no arena."""
    attachment = cache.attachments.find(attachment_id)
    if not attachment.arena:
        raise UnsupportedError(
            "this attachment has no arena",
            field="attachment",
            allowed="one made over a Unix socket with want_arena",
        )
    return attachment


def reserve_in_place(cache: Cache, request: pb.ReserveRequest) -> pb.ReserveResponse:
    """Slots for the blocks that the client may write. Raises InvalidRequestError, UnsupportedError."""
    attachment = _with_arena(cache, request.attachment)
    hashes, parents = requests.linked_hashes(request.hashes, request.parents)
    asker = requests.asker(request.tenant, request.session.id)
    hold_s = requests.hold(request.hold) if request.HasField("hold") else 0.0
    reservation, begun = cache.reserve(
        attachment,
        cache.names(asker, hashes),
        cache.names(asker, parents),
        requests.span(request.heads),
        hold_s,
        tenant=asker.tenant,
        session=requests.session(request.session),
    )
    slots = b"".join(_slot(cache.memory.slots, write) for write in begun)
    declined = [_declined(index, refusal) for index, refusal in enumerate(begun) if isinstance(refusal, Refusal)]
    return pb.ReserveResponse(reservation=reservation, slots=slots, declined=declined)


async def commit_in_place(cache: Cache, request: pb.CommitRequest) -> pb.CommitResponse:
    """Checks and finishes what the client wrote. Raises InvalidRequestError, UnsupportedError, ConflictError."""
    attachment = _with_arena(cache, request.attachment)
    reservation = cache.reservations.find(attachment.id, request.reservation)
    claims = _claims(request, reservation.writes)
    keep = Keep(requests.lifetime(request), reservation.session)
    durable = requests.durability(request.durability) is Durability.DISK
    cache.reservations.remove(request.reservation)
    outcomes = await commit(cache.writer, reservation.writes, claims, keep, durable=durable)
    if reservation.writes:
        last = reservation.writes[-1].block
        cache.aftermath.of_write(last.namespace, last.hash)
    if reservation.hold_s:
        for write, outcome in zip(reservation.writes, outcomes, strict=True):
            if outcome.status is PutStatus.STORED and write.block.present:
                cache.hold(write.block, reservation.hold_s)
    return pb.CommitResponse(
        statuses=[pb.PutStatus.ValueType(outcome.status) for outcome in outcomes],
        refusals=[pb.PutRefusal.ValueType(outcome.refusal or PutRefusal.UNSPECIFIED) for outcome in outcomes],
    )


def _claims(request: pb.CommitRequest, writes: Sequence[Write]) -> Sequence[Claim]:
    """What the client says of each slot: xxh3-128 as bytes, or a linear checksum as int."""
    if not request.linear_checksums:
        packed = requests.exact_bytes(request.checksums, (CHECKSUM_BYTES * len(writes),), "checksums")
        return [packed[at : at + CHECKSUM_BYTES] for at in range(0, len(packed), CHECKSUM_BYTES)]
    requests.exact_bytes(request.checksums, (0,), "checksums")
    packed = requests.exact_bytes(request.linear_checksums, (_LINEAR.size * len(writes),), "linear_checksums")
    if not all(write.whole for write in writes):
        raise InvalidRequestError(
            "linear checksums of a part of the heads", field="linear_checksums", allowed="reservations of all heads"
        )
    return [claim for (claim,) in _LINEAR.iter_unpack(packed)]


def _slot(slots: SlabAllocator[Block], begun: Write | Refusal) -> bytes:
    if isinstance(begun, Refusal) or begun.block.memory is None:
        return _NOTHING
    return SLOT.pack(slots.position(begun.block.memory), begun.block.memory.generation)


def _declined(index: int, refusal: Refusal) -> pb.PutResult:
    if refusal.present is not None:
        return pb.PutResult(index=index, status=pb.PUT_STATUS_PRESENT)
    return pb.PutResult(
        index=index, status=pb.PUT_STATUS_REFUSED, refusal=pb.PutRefusal.ValueType(refusal.refusal or 0)
    )
