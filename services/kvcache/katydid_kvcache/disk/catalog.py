"""The LMDB index of the disk tier: which slot holds which block, written only after the slot's bytes.

It makes a restart cheap. It is not believed: every read checks the slot's own header, and a catalogue that is missing,
unreadable, damaged or unfinished is rebuilt from the headers. Rows carry a checksum of their own, so that damage shows.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import lmdb
from katydid_cache.layout import BlockLayout
from katydid_runtime.errors import InvalidRequestError
from xxhash import xxh3_64_intdigest

from katydid_kvcache.blocks import Block
from katydid_kvcache.disk.slot_header import SlotHeader
from katydid_kvcache.slabs import Slot

__all__ = ["Catalog", "Row"]

_ROW = struct.Struct("<IIQd16s32s16sdQ")
_CHECK = struct.Struct("<Q")
_BLOCKS, _NAMESPACES, _META = b"blocks", b"namespaces", b"meta"
_BOOT, _COMPLETE = b"boot", b"complete"
_KEY_BYTES = 64


@dataclass(frozen=True, slots=True)
class Row:
    """Block `hash` of namespace `identity` is in `slot`."""

    identity: bytes
    hash: bytes
    parent: bytes
    slot: Slot
    checksum: bytes
    expires_at: float
    tenant: bytes = b""
    sliding_s: float = 0.0
    linear: int = 0

    @classmethod
    def of(cls, header: SlotHeader, slot: Slot) -> Row:
        """The row of a slot with this header."""
        return cls(
            header.identity,
            header.hash,
            header.parent,
            slot,
            header.checksum,
            header.expires_at,
            header.tenant,
            header.sliding_s,
            header.linear,
        )

    @classmethod
    def of_block(cls, block: Block, slot: Slot) -> Row:
        """The row of a complete block in `slot`."""
        return cls(
            block.namespace.identity,
            block.hash,
            block.parent,
            slot,
            block.checksum,
            block.expires_at,
            block.tenant,
            block.sliding_s,
            block.linear,
        )

    @property
    def key(self) -> bytes:
        return self.identity + self.hash

    def encode(self) -> bytes:
        slot = self.slot
        fields = _ROW.pack(
            slot.slab,
            slot.index,
            slot.generation,
            self.expires_at,
            self.checksum,
            self.parent or bytes(32),
            self.tenant or bytes(16),
            self.sliding_s,
            self.linear,
        )
        return fields + _CHECK.pack(xxh3_64_intdigest(self.key + fields))

    @classmethod
    def decode(cls, key: bytes, value: bytes) -> Row | None:
        """The row, or None when it is not what was written."""
        fields, check = value[: _ROW.size], value[_ROW.size :]
        if len(key) != _KEY_BYTES or len(fields) != _ROW.size or check != _CHECK.pack(xxh3_64_intdigest(key + fields)):
            return None
        slab, index, generation, expires_at, checksum, parent, tenant, sliding_s, linear = _ROW.unpack(fields)
        parent = b"" if parent == bytes(32) else parent
        tenant = b"" if tenant == bytes(16) else tenant
        return cls(
            key[:32], key[32:], parent, Slot(slab, index, generation), checksum, expires_at, tenant, sliding_s, linear
        )


class Catalog:
    """The index in `folder`. Reads at start; afterwards one thread writes, one transaction a group of changes.

    With `sync` a transaction is on the device when it ends. Raises lmdb.Error when the files are no index.
    """

    def __init__(self, folder: Path, map_bytes: int, *, sync: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Without metasync the last transaction before a power cut would be lost, though it had been answered.
        self._env = lmdb.open(
            str(folder), map_size=map_bytes, max_dbs=3, sync=sync, metasync=sync, mode=0o640, max_spare_txns=1
        )
        try:
            self._blocks, self._namespaces, self._meta = (
                self._env.open_db(name) for name in (_BLOCKS, _NAMESPACES, _META)
            )
        except lmdb.Error:
            self._env.close()
            raise

    def begin_boot(self, at_least: int) -> int:
        """Count a start of the service; the number is larger than every one before, and than `at_least`."""
        with self._env.begin(write=True) as transaction:
            last = transaction.get(_BOOT, db=self._meta)
            boot = max(at_least, int.from_bytes(last, "little") if last else 0) + 1
            transaction.put(_BOOT, boot.to_bytes(8, "little"), db=self._meta)
        return boot

    @property
    def complete(self) -> bool:
        """Whether the index holds everything that was committed; False for a new one."""
        with self._env.begin() as transaction:
            return transaction.get(_COMPLETE, db=self._meta) is not None

    def namespaces(self) -> Iterator[tuple[bytes, BlockLayout]]:
        """All namespaces. Raises lmdb.CorruptedError for one that is not what was written."""
        with self._env.begin() as transaction:
            for identity, value in transaction.cursor(db=self._namespaces):
                try:
                    yield bytes(identity), BlockLayout(**json.loads(value))
                except (ValueError, TypeError, InvalidRequestError):
                    raise lmdb.CorruptedError("a namespace of the index is damaged") from None

    def rows(self) -> Iterator[Row]:
        """All rows. Raises lmdb.CorruptedError for one that is not what was written."""
        with self._env.begin() as transaction:
            for key, value in transaction.cursor(db=self._blocks):
                row = Row.decode(bytes(key), bytes(value))
                if row is None:
                    raise lmdb.CorruptedError("a row of the index is damaged")
                yield row

    def rebuild(self, namespaces: Iterable[tuple[bytes, BlockLayout]], rows: Iterable[Row]) -> None:
        """Replace everything, and mark the index as complete."""
        with self._env.begin(write=True) as transaction:
            transaction.drop(self._blocks, delete=False)
            for identity, layout in namespaces:
                transaction.put(identity, _encode_layout(layout), db=self._namespaces)
            for row in rows:
                transaction.put(row.key, row.encode(), db=self._blocks)
            transaction.put(_COMPLETE, b"1", db=self._meta)

    def apply(
        self, namespaces: Iterable[tuple[bytes, BlockLayout]], changes: Iterable[tuple[bytes, bytes | None]]
    ) -> None:
        """One transaction: new namespaces, then for each key its new value, or None to delete it. Raises lmdb.Error."""
        with self._env.begin(write=True) as transaction:
            for identity, layout in namespaces:
                transaction.put(identity, _encode_layout(layout), db=self._namespaces)
            for key, value in changes:
                if value is None:
                    transaction.delete(key, db=self._blocks)
                else:
                    transaction.put(key, value, db=self._blocks)

    def sync(self) -> None:
        self._env.sync(True)

    def close(self) -> None:
        self._env.close()


def _encode_layout(layout: BlockLayout) -> bytes:
    return json.dumps(asdict(layout)).encode()
