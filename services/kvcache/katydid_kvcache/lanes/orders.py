"""What a service asks of its receiver processes, as messages of a socket between them.

The first message to a process are Credentials; then come orders, each answered before the next: 16 bytes a block, its
xxh3-128 where it has arrived and is right, else ARRIVED_NOT.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from katydid_cache.lane import CHECKSUM_BYTES, TOKEN_BYTES
from katydid_cache.layout import BlockLayout
from katydid_runtime.block_hash import HASH_BYTES
from katydid_runtime.tls import Tls

__all__ = ["ARRIVED_NOT", "MESSAGE_BYTES", "Credentials", "LaneOrder", "StreamOrder", "unpack_order"]

MESSAGE_BYTES = 192 * 1024
"""A message is at most so long, which is an order of 4,096 blocks."""

ARRIVED_NOT = bytes(CHECKSUM_BYTES)

_LANE, _STREAM = b"L", b"S"
_LANE_HEAD = struct.Struct(f"<QdHH{TOKEN_BYTES}s")
_LANE_PLACE = struct.Struct(f"<Q{CHECKSUM_BYTES}s")
_STREAM_HEAD = struct.Struct("<I")
_STREAM_PLACE = struct.Struct(f"<Q{HASH_BYTES}s")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a receiver shows to the instances that it reads from by stream."""

    tls: Tls | None
    token: str | None

    def pack(self) -> bytes:
        tls = None if self.tls is None else {name: _text(value) for name, value in asdict(self.tls).items()}
        return json.dumps({"tls": tls, "token": self.token}).encode()

    @classmethod
    def unpack(cls, message: bytes) -> Credentials:
        fields = json.loads(message)
        tls = fields["tls"]
        return cls(
            None if tls is None else Tls(**{name: _bytes(value) for name, value in tls.items()}), fields["token"]
        )


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """Blocks of `block_bytes` to fetch for `token` at `host`:`port`, each to an arena offset with its checksum."""

    host: str
    port: int
    token: bytes
    stall_s: float
    block_bytes: int
    places: Sequence[tuple[int, bytes]]

    def pack(self) -> bytes:
        host = self.host.encode()
        head = _LANE_HEAD.pack(self.block_bytes, self.stall_s, self.port, len(host), self.token)
        return b"".join((_LANE, head, host, *(_LANE_PLACE.pack(*place) for place in self.places)))


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """Blocks of a namespace to get by stream from the instance at `address`, each to an arena offset by its hash.

    They are asked for on behalf of `tenant` and `session`, and not worth anything after `timeout_s`.
    """

    address: str
    identity: bytes
    layout: BlockLayout
    tenant: bytes
    session: bytes
    timeout_s: float
    places: Sequence[tuple[int, bytes]]

    def pack(self) -> bytes:
        fields = {
            "address": self.address,
            "identity": self.identity.hex(),
            "layout": asdict(self.layout),
            "tenant": self.tenant.hex(),
            "session": self.session.hex(),
            "timeout_s": self.timeout_s,
        }
        head = json.dumps(fields).encode()
        packed = (_STREAM_PLACE.pack(*place) for place in self.places)
        return b"".join((_STREAM, _STREAM_HEAD.pack(len(head)), head, *packed))


def unpack_order(message: bytes) -> LaneOrder | StreamOrder:
    """The order in a message."""
    kind, rest = message[:1], memoryview(message)[1:]
    if kind == _LANE:
        block_bytes, stall_s, port, host_bytes, token = _LANE_HEAD.unpack_from(rest)
        at = _LANE_HEAD.size + host_bytes
        host = str(rest[_LANE_HEAD.size : at], "utf-8")
        return LaneOrder(host, port, token, stall_s, block_bytes, [*_LANE_PLACE.iter_unpack(rest[at:])])
    (head_bytes,) = _STREAM_HEAD.unpack_from(rest)
    at = _STREAM_HEAD.size + head_bytes
    fields = json.loads(bytes(rest[_STREAM_HEAD.size : at]))
    return StreamOrder(
        fields["address"],
        bytes.fromhex(fields["identity"]),
        BlockLayout(**fields["layout"]),
        bytes.fromhex(fields["tenant"]),
        bytes.fromhex(fields["session"]),
        fields["timeout_s"],
        [*_STREAM_PLACE.iter_unpack(rest[at:])],
    )


def _text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _bytes(value: str | None) -> bytes | None:
    return None if value is None else base64.b64decode(value)
