"""Checks of what clients send: every field that can be wrong is named with its value and what is allowed."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache.asking import Asker
from katydid_cache.layout import BlockLayout, Span
from katydid_cache.records import Durability
from katydid_runtime.block_hash import HASH_BYTES, split_hashes
from katydid_runtime.duration import to_seconds
from katydid_runtime.errors import InvalidRequestError

from katydid_kvcache.policy.lifetimes import Lifetime, SessionTerms

__all__ = [
    "FRAME_BYTES",
    "HASH_LIMIT",
    "asker",
    "durability",
    "exact_bytes",
    "hash_list",
    "hold",
    "layout",
    "lifetime",
    "linked_hashes",
    "seconds",
    "session",
    "span",
    "ttl",
]

FRAME_BYTES = 1024 * 1024
HASH_LIMIT = 4096

_DAY_S = 86_400.0
_ID_SIZES = (0, 16)
_YEAR_S = 365 * _DAY_S


def exact_bytes(value: bytes, sizes: tuple[int, ...], field: str) -> bytes:
    """`value` if it has one of the sizes."""
    if len(value) not in sizes:
        raise InvalidRequestError(
            f"{field} has {len(value)} bytes",
            field=field,
            value=value.hex(),
            allowed=" or ".join(f"{size} bytes" for size in sizes),
        )
    return value


def asker(tenant: bytes, session: bytes) -> Asker:
    """Who asks, by two ids of 16 bytes each, or empty."""
    return Asker(exact_bytes(tenant, _ID_SIZES, "tenant"), exact_bytes(session, _ID_SIZES, "session.id"))


def session(message: pb.Session) -> SessionTerms | None:
    """The session a call belongs to; None without one."""
    if not exact_bytes(message.id, _ID_SIZES, "session.id"):
        return None
    lifetime = None
    if message.HasField("ttl"):
        lifetime = Lifetime(seconds(message.ttl, "session.ttl", limit=_YEAR_S), message.sliding)
    return SessionTerms(message.id, lifetime)


def lifetime(message: pb.PutStart | pb.CommitRequest) -> Lifetime | None:
    """How long a write's blocks are to live; None when it does not say."""
    return Lifetime(ttl(message.ttl), message.sliding) if message.HasField("ttl") else None


def hash_list(packed: bytes, *, field: str = "hashes", limit: int = HASH_LIMIT) -> list[bytes]:
    """The hashes in a packed list of at most `limit`."""
    if len(packed) % HASH_BYTES or len(packed) > limit * HASH_BYTES:
        raise InvalidRequestError(
            f"{field} has {len(packed)} bytes",
            field=field,
            value=len(packed),
            allowed=f"{HASH_BYTES} bytes a hash, at most {limit} hashes",
        )
    return split_hashes(packed)


def linked_hashes(hashes: bytes, parents: bytes) -> tuple[list[bytes], list[bytes]]:
    """The hashes in a packed list and the hash before each of them, empty for a first block."""
    names, before = hash_list(hashes), hash_list(parents, field="parents")
    if len(before) != len(names):
        raise InvalidRequestError(
            f"{len(before)} parents for {len(names)} hashes",
            field="parents",
            value=len(before),
            allowed="one a hash, 32 zero bytes for a first block",
        )
    return names, [b"" if parent == bytes(HASH_BYTES) else parent for parent in before]


def span(heads: pb.HeadRange) -> Span:
    return Span(heads.first, heads.count)


def layout(message: pb.BlockLayout) -> BlockLayout:
    """The layout, whose `block_bytes` must be what the other fields give."""
    parsed = BlockLayout(
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        dtype=message.dtype,
        block_tokens=message.block_tokens,
        version=message.version,
    )
    if message.block_bytes != parsed.block_bytes:
        raise InvalidRequestError(
            f"layout.block_bytes is {message.block_bytes}, its other fields give {parsed.block_bytes}",
            field="layout.block_bytes",
            value=message.block_bytes,
            allowed=str(parsed.block_bytes),
        )
    return parsed


def durability(value: int) -> Durability:
    """The durability; unspecified is MEMORY."""
    try:
        return Durability(value or Durability.MEMORY)
    except ValueError:
        raise InvalidRequestError(
            f"durability {value} is unknown", field="durability", value=value, allowed="MEMORY or DISK"
        ) from None


def seconds(duration: Duration, field: str, *, limit: float) -> float:
    """A duration in seconds, from 0 to `limit`."""
    value = to_seconds(duration)
    if not 0 <= value <= limit:
        raise InvalidRequestError(
            f"{field} is {value:g} s", field=field, value=f"{value:g}", allowed=f"0 to {limit:g} s"
        )
    return value


def hold(duration: Duration) -> float:
    """For how long a block is kept for a hand-off, in seconds."""
    return seconds(duration, "hold", limit=_DAY_S)


def ttl(duration: Duration) -> float:
    """A block's time to live in seconds."""
    return seconds(duration, "ttl", limit=_YEAR_S)
