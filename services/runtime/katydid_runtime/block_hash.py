"""Names of KV blocks: a SHA-256 chain over token ids that every process computes alike.

    h_i  = SHA-256(f("katydid.block.v1") || f(h_{i-1}) || f(salt_i) || f(ids_i as little-endian uint32))
    h_-1 = SHA-256(f("katydid.root.v1")  || f(model identity) || f(adapter name in UTF-8))
    f(x) = length of x in bytes as little-endian uint32 || x

A block is 64 tokens; a partial last block has no hash. `salt_i` is empty for the first `public_blocks` blocks, so that
a shared system prompt is shared between tenants, and the tenant's salt afterwards. Two chains that differ anywhere in
identity, adapter, salt or tokens differ in every later hash. docs/block-hash.md publishes test vectors.

Bound: 2,048 blocks (128K tokens) in about 1.5 ms; one `sha256` call a block over one concatenation is the fastest form,
mid-state copies and one update a field are slower at this size.
"""

from __future__ import annotations

import itertools
import struct
import sys
from array import array
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeAlias

__all__ = [
    "BLOCK_TOKENS",
    "HASH_BYTES",
    "RUN_BLOCKS",
    "ChainKey",
    "TokenIds",
    "fingerprint",
    "hash_chain",
    "pack_ids",
    "split_hashes",
    "unpack_ids",
]

BLOCK_TOKENS = 64
HASH_BYTES = 32
RUN_BLOCKS = 128
"""Blocks of a chain that one cache instance keeps together, counted from the chain's beginning (docs/kvcache.md)."""

TokenIds: TypeAlias = "bytes | bytearray | memoryview | array[int]"

_BLOCK_DOMAIN = b"katydid.block.v1"
_ROOT_DOMAIN = b"katydid.root.v1"
_ID_BYTES = 4
_BLOCK_BYTES = BLOCK_TOKENS * _ID_BYTES
_MANY = struct.Struct(f"{HASH_BYTES}s" * 64)


@dataclass(frozen=True, slots=True)
class ChainKey:
    """Everything but the tokens that decides a request's block hashes.

    `identity` is the model's identity digest (never empty), `adapter` the LoRA adapter's name or "", `salt` the
    tenant's salt or b"", `public_blocks` how many leading blocks go unsalted.
    Raises ValueError for an empty identity or a negative `public_blocks`.
    """

    identity: bytes
    adapter: str = ""
    salt: bytes = b""
    public_blocks: int = 0
    root: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.identity:
            raise ValueError("identity is empty; every model has an identity digest")
        if self.public_blocks < 0:
            raise ValueError(f"public_blocks is {self.public_blocks}; it must be >= 0")
        root = sha256(_field(_ROOT_DOMAIN) + _field(self.identity) + _field(self.adapter.encode())).digest()
        object.__setattr__(self, "root", root)

    def extend(self, ids: TokenIds, *, first_block: int = 0, previous: bytes = b"") -> bytes:
        """Packed 32-byte hashes of the full blocks in `ids`, which continue a chain.

        `ids` are little-endian uint32 (or a native array of 4-byte integers) starting at token `64 * first_block`;
        `previous` is the hash of block `first_block - 1`, empty when `first_block` is 0.
        Raises ValueError when `previous` does not fit `first_block`, or `ids` is no whole number of ids.
        """
        if len(previous) != (HASH_BYTES if first_block else 0):
            raise ValueError(f"previous has {len(previous)} bytes, which does not fit first_block={first_block}")
        packed = pack_ids(ids)
        head = _field(_BLOCK_DOMAIN) + _length(HASH_BYTES)
        tail = _length(_BLOCK_BYTES)
        unsalted, salted = _field(b"") + tail, _field(self.salt) + tail
        digest = previous or self.root
        blocks = len(packed) // _BLOCK_BYTES
        public_end = min(blocks, max(0, self.public_blocks - first_block)) * _BLOCK_BYTES
        hashes = []
        for start in range(0, public_end, _BLOCK_BYTES):
            digest = sha256(head + digest + unsalted + packed[start : start + _BLOCK_BYTES]).digest()
            hashes.append(digest)
        for start in range(public_end, blocks * _BLOCK_BYTES, _BLOCK_BYTES):
            digest = sha256(head + digest + salted + packed[start : start + _BLOCK_BYTES]).digest()
            hashes.append(digest)
        return b"".join(hashes)


def hash_chain(
    ids: TokenIds,
    *,
    identity: bytes,
    adapter: str = "",
    salt: bytes = b"",
    public_blocks: int = 0,
) -> bytes:
    """Packed 32-byte hashes of the full 64-token blocks of a whole prompt. See `ChainKey` and `ChainKey.extend`."""
    return ChainKey(identity, adapter, salt, public_blocks).extend(ids)


def pack_ids(ids: TokenIds) -> bytes:
    """`ids` as little-endian uint32 bytes: the form every message carries.

    Accepts bytes already in that form, or any contiguous buffer of native 4-byte integers (array("I"), numpy uint32
    or int32). Raises ValueError for another item size or a byte count that is no multiple of 4.
    """
    if isinstance(ids, bytes):
        packed, native = ids, False
    else:
        view = memoryview(ids)
        if view.itemsize not in (1, _ID_BYTES):
            raise ValueError(f"token ids have {view.itemsize} bytes an item; they must have 4, or be packed bytes")
        packed, native = view.tobytes(), view.itemsize == _ID_BYTES
    if len(packed) % _ID_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of 4-byte token ids")
    if native and sys.byteorder == "big":
        swapped = array("I", packed)
        swapped.byteswap()
        return swapped.tobytes()
    return packed


def unpack_ids(packed: bytes) -> array[int]:
    """The ids that `pack_ids` packed. Raises ValueError for a byte count that is no multiple of 4."""
    ids = array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def split_hashes(packed: bytes) -> list[bytes]:
    """The 32-byte hashes in `packed`, the form in which messages carry chains."""
    many = len(packed) - len(packed) % _MANY.size
    hashes = [*itertools.chain.from_iterable(_MANY.iter_unpack(packed[:many]))]
    hashes += (packed[start : start + HASH_BYTES] for start in range(many, len(packed), HASH_BYTES))
    return hashes


def fingerprint(identity: bytes) -> bytes:
    """32 bytes that depend on `identity` and on every choice in this module.

    It is the SHA-256 of the chain of a golden prompt (ids 0..127, adapter "golden", salt b"golden" after one public
    block). Processes that exchange hashes compare it first: `DescribeResponse.hash_fingerprint`.
    """
    ids = array("I", range(2 * BLOCK_TOKENS))
    return sha256(hash_chain(ids, identity=identity, adapter="golden", salt=b"golden", public_blocks=1)).digest()


def _length(size: int) -> bytes:
    return size.to_bytes(4, "little")


def _field(content: bytes) -> bytes:
    return _length(len(content)) + content
