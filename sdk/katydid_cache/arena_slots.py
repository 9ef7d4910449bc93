"""Where blocks lie in the shared memory: packed as they came, unpacked one by one.

A lookup may find thousands of blocks, and must not pay for those whose place nobody asks for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

__all__ = ["CHECKSUM_BYTES", "NO_SLOT", "SLOT", "ArenaSlot", "ArenaSlots"]

SLOT = struct.Struct("<QQ")
"""Offset and generation."""

NO_SLOT = 2**64 - 1
"""Offset of a slot that was not given."""

CHECKSUM_BYTES = 16
_LINEAR = struct.Struct("<Q")


class ArenaSlot(NamedTuple):
    """A block in the shared memory: byte offset and generation; where it was found also its xxh3-128 (16 bytes).

    `linear` is its 64-bit linear checksum, 0 where none is known.
    """

    offset: int
    generation: int
    checksum: bytes = b""
    linear: int = 0


class ArenaSlots(Sequence[ArenaSlot]):
    """Slots as the service packs them: 16 bytes a slot, 16 a checksum, and 8 a linear checksum or none."""

    def __init__(self, slots: bytes = b"", checksums: bytes = b"", linear: bytes = b"") -> None:
        self._slots = slots
        self._checksums = checksums
        self._linear = linear

    def __len__(self) -> int:
        return len(self._slots) // SLOT.size

    @overload
    def __getitem__(self, index: int) -> ArenaSlot: ...

    @overload
    def __getitem__(self, index: slice) -> list[ArenaSlot]: ...

    def __getitem__(self, index: int | slice) -> ArenaSlot | list[ArenaSlot]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        offset, generation = SLOT.unpack_from(self._slots, SLOT.size * at)
        checksum = self._checksums[CHECKSUM_BYTES * at : CHECKSUM_BYTES * (at + 1)]
        linear = _LINEAR.unpack_from(self._linear, _LINEAR.size * at)[0] if self._linear else 0
        return ArenaSlot(offset, generation, checksum, linear)

    def __iter__(self) -> Iterator[ArenaSlot]:
        return (self[index] for index in range(len(self)))
