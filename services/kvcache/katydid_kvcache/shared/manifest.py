"""What stands in front of every pack: which blocks it holds, and where in it.

    magic 8 | version u32 | count u32 | identity 32 | layers u32 | kv_heads u32 | head_dim u32 | dtype 16 |
    count rows | xxh3-128 of all before 16

    row: hash 32 | parent 32 | checksum 16 | tenant 16 | expires_at f64 | sliding_s f64 | linear u64 | offset u64

Little-endian; `offset` counts from the start of the pack. A manifest without payloads behind it says that these blocks
are no longer to be used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from katydid_cache.layout import BlockLayout
from katydid_runtime.errors import DataCorruptError, InvalidRequestError
from xxhash import xxh3_128_digest

__all__ = ["Entry", "Location", "Manifest", "manifest_bytes"]

_MAGIC = b"katydPK\x01"
_VERSION = 1
_HEAD = struct.Struct("<8sII32sIII16s")
_ROW = struct.Struct("<32s32s16s16sddQQ")
_CHECKSUM_BYTES = 16


def manifest_bytes(count: int) -> int:
    """Size of the manifest of a pack of `count` blocks."""
    return _HEAD.size + count * _ROW.size + _CHECKSUM_BYTES


class Location(NamedTuple):
    """Where a block's payload is in the shared store, and the checksums of what was put there."""

    object: str
    offset: int
    checksum: bytes
    linear: int


_NOWHERE = Location("", 0, bytes(16), 0)


@dataclass(frozen=True, slots=True)
class Entry:
    """A block in the shared store: 32-byte `name`, `parent` and `tenant` possibly empty; times as in `Block`.

    Without a location it is not to be looked for in the store any longer.
    """

    name: bytes
    parent: bytes
    tenant: bytes
    expires_at: float
    sliding_s: float
    location: Location | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The blocks of one pack, all of one namespace."""

    identity: bytes
    layout: BlockLayout
    entries: Sequence[Entry]

    def encode(self) -> bytes:
        """The manifest, `manifest_bytes(len(entries))` long."""
        layout = self.layout
        parts = [
            _HEAD.pack(
                _MAGIC,
                _VERSION,
                len(self.entries),
                self.identity,
                layout.layers,
                layout.kv_heads,
                layout.head_dim,
                layout.dtype.encode(),
            )
        ]
        for entry in self.entries:
            at = entry.location or _NOWHERE
            parts.append(
                _ROW.pack(
                    entry.name,
                    entry.parent or bytes(32),
                    at.checksum,
                    entry.tenant or bytes(16),
                    entry.expires_at,
                    entry.sliding_s,
                    at.linear,
                    at.offset,
                )
            )
        fields = b"".join(parts)
        return fields + xxh3_128_digest(fields)

    @classmethod
    def decode(cls, data: bytes | memoryview, name: str, *, withdrawn: bool = False) -> Manifest:
        """The manifest of the pack called `name`; `withdrawn` when there are no payloads behind it.

        Raises DataCorruptError for anything but a whole manifest.
        """
        fields, checksum = bytes(data[:-_CHECKSUM_BYTES]), bytes(data[-_CHECKSUM_BYTES:])
        if len(fields) < _HEAD.size or (len(fields) - _HEAD.size) % _ROW.size or checksum != xxh3_128_digest(fields):
            raise DataCorruptError(f"pack {name} has no valid manifest")
        magic, version, count, identity, layers, heads, dim, dtype = _HEAD.unpack_from(fields)
        if magic != _MAGIC or version != _VERSION or len(fields) != _HEAD.size + count * _ROW.size:
            raise DataCorruptError(f"pack {name} is of another version")
        try:
            layout = BlockLayout(layers, heads, dim, dtype.rstrip(b"\0").decode("ascii", "replace"))
        except InvalidRequestError as error:
            raise DataCorruptError(f"pack {name}: {error}") from None
        entries = []
        for row in _ROW.iter_unpack(fields[_HEAD.size :]):
            block, parent, payload, tenant, expires_at, sliding_s, linear, offset = row
            entries.append(
                Entry(
                    block,
                    b"" if parent == bytes(32) else parent,
                    b"" if tenant == bytes(16) else tenant,
                    expires_at,
                    sliding_s,
                    None if withdrawn else Location(name, offset, payload, linear),
                )
            )
        return cls(identity, layout, entries)
