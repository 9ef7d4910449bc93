"""Reserve, Commit and what lookups tell of the shared memory: the calls of clients that read and write in place."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache.arena_slots import CHECKSUM_BYTES, NO_SLOT, SLOT
from katydid_cache.records import Durability, PutRefusal, PutStatus
from katydid_runtime.errors import InvalidRequestError, UnsupportedError

from katydid_kvcache import requests
from katydid_kvcache.attachments import Attachment
from katydid_kvcache.blocks import Block
from katydid_kvcache.cache import Cache
from katydid_kvcache.memory import MemoryTier
from katydid_kvcache.policy.lifetimes import Keep
from katydid_kvcache.store import Refusal, Write
from katydid_kvcache.writing import Claim, commit

__all__ = ["PackedSlots", "commit_in_place", "reserve_in_place"]

_NOTHING = SLOT.pack(NO_SLOT, 0)
_LINEAR = struct.Struct("<Q")


class PackedSlots:
    """Blocks in memory as the protocol packs them: slots, xxh3-128 checksums, and linear ones if there are any."""

    def __init__(self, memory: MemoryTier, blocks: Sequence[Block]) -> None:
        self.slots = memory.pack(blocks)
        self.checksums = b"".join([block.checksum for block in blocks])
        linear = [block.linear for block in blocks]
        self.linear_checksums = struct.pack(f"<{len(linear)}Q", *linear) if any(linear) else b""


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
    slots = b"".join(_slot(cache.memory, write) for write in begun)
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
    if not all(write.block.namespace.covers(write.heads) for write in writes):
        raise InvalidRequestError(
            "linear checksums of a part of the heads", field="linear_checksums", allowed="reservations of all heads"
        )
    return [claim for (claim,) in _LINEAR.iter_unpack(packed)]


def _slot(memory: MemoryTier, begun: Write | Refusal) -> bytes:
    return memory.pack([begun.block]) if isinstance(begun, Write) else _NOTHING


def _declined(index: int, refusal: Refusal) -> pb.PutResult:
    if refusal.present is not None:
        return pb.PutResult(index=index, status=pb.PUT_STATUS_PRESENT)
    return pb.PutResult(
        index=index, status=pb.PUT_STATUS_REFUSED, refusal=pb.PutRefusal.ValueType(refusal.refusal or 0)
    )
