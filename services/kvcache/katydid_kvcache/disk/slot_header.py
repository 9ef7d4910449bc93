"""The 4 KiB page in front of every slot on disk: it alone says what the slot holds, the index only finds it.

    magic 8 | version u32 | payload bytes u64 | generation u64 | expires_at f64 | identity 32 | hash 32 | parent 32 |
    payload checksum 16 | layers u32 | kv_heads u32 | head_dim u32 | dtype 16 | tenant 16 | sliding_s f64 |
    linear checksum u64 | xxh3-128 of all before 16 | zeros

Little-endian. A header that fails its own checksum is no header; a payload that fails the header's checksum is torn or
rotten. The layout stands in every header so that a scan can rebuild namespaces when the index is gone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from katydid_cache.layout import BlockLayout
from katydid_runtime.errors import InvalidRequestError
from xxhash import xxh3_128_digest

from katydid_kvcache.blocks import PAGE_BYTES

__all__ = ["HEADER_BYTES", "SlotHeader"]

HEADER_BYTES = PAGE_BYTES

_MAGIC = b"katydKV\x01"
_VERSION = 2
_FIELDS = struct.Struct("<8sIQQd32s32s32s16sIII16s16sdQ")
_CHECKSUM_BYTES = 16


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What one slot holds. `parent` is empty for a first block; `expires_at` in Unix seconds, 0 for never.

    `tenant` is empty when nobody's; `sliding_s` is the time to live that starts anew with every use, 0 when it doesn't.
    `linear` is the 64-bit linear checksum that a GPU made of the payload, beside the xxh3-128 `checksum`; 0: none did.
    """

    identity: bytes
    hash: bytes
    parent: bytes
    generation: int
    checksum: bytes
    expires_at: float
    layout: BlockLayout
    tenant: bytes = b""
    sliding_s: float = 0.0
    linear: int = 0

    def encode(self) -> bytes:
        """The header page, HEADER_BYTES long."""
        layout = self.layout
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            layout.block_bytes,
            self.generation,
            self.expires_at,
            self.identity,
            self.hash,
            self.parent or bytes(32),
            self.checksum,
            layout.layers,
            layout.kv_heads,
            layout.head_dim,
            layout.dtype.encode(),
            self.tenant or bytes(16),
            self.sliding_s,
            self.linear,
        )
        return (fields + xxh3_128_digest(fields)).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, page: bytes | memoryview) -> SlotHeader | None:
        """The header in a page, or None when there is none: never written, torn, flipped, or of another version."""
        fields = bytes(page[: _FIELDS.size])
        if len(fields) < _FIELDS.size or fields[: len(_MAGIC)] != _MAGIC:
            return None
        if bytes(page[_FIELDS.size : _FIELDS.size + _CHECKSUM_BYTES]) != xxh3_128_digest(fields):
            return None
        (
            _,
            version,
            size,
            generation,
            expires_at,
            identity,
            block_hash,
            parent,
            checksum,
            layers,
            heads,
            dim,
            dtype,
            tenant,
            sliding_s,
            linear,
        ) = _FIELDS.unpack(fields)
        try:
            layout = BlockLayout(layers, heads, dim, dtype.rstrip(b"\0").decode("ascii", "replace"))
        except InvalidRequestError:
            return None
        if version != _VERSION or size != layout.block_bytes:
            return None
        parent = b"" if parent == bytes(32) else parent
        tenant = b"" if tenant == bytes(16) else tenant
        return cls(identity, block_hash, parent, generation, checksum, expires_at, layout, tenant, sliding_s, linear)
