"""Memory for blocks on their way between the face and its workers: slots of one store object each.

The first ``write_slots`` are packed by the workers and emptied by the face, the rest are filled by the face and
unpacked by the workers. Who may touch a slot is settled by messages; the memory itself holds bytes alone.

A cache service on the same host gives the face its own memory. A block in there needs no staging: its slot has a number
that names the face's descriptor and the 4 KiB page where the block begins, see ``arena_slot``.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

__all__ = ["ARENA_PAGE_BYTES", "Staging", "StagingShape", "arena_place", "arena_slot"]

ARENA_PAGE_BYTES = 4096

_PAGE_BITS = 40


def arena_slot(descriptor: int, offset: int) -> int:
    """Number of the slot at byte ``offset`` (of a page's beginning) of the memory behind the face's ``descriptor``.

    Larger than every number of a staging slot.
    """
    return descriptor << _PAGE_BITS | offset // ARENA_PAGE_BYTES


def arena_place(slot: int) -> tuple[int, int] | None:
    """The descriptor and page that a slot's number names; None for a slot of the staging buffer."""
    descriptor, page = divmod(slot, 1 << _PAGE_BITS)
    return (descriptor, page) if descriptor else None


@dataclass(frozen=True, slots=True)
class StagingShape:
    """``slot_bytes`` is the size of a block's store object with all KV heads of the model."""

    slot_bytes: int
    write_slots: int
    read_slots: int

    @property
    def writing(self) -> range:
        return range(self.write_slots)

    @property
    def reading(self) -> range:
        return range(self.write_slots, self.write_slots + self.read_slots)

    @property
    def num_bytes(self) -> int:
        return self.slot_bytes * (self.write_slots + self.read_slots)


class Staging:
    """A mapping of the shared memory behind ``descriptor``, made by ``create`` in the face and inherited by workers."""

    def __init__(self, shape: StagingShape, descriptor: int) -> None:
        self.shape = shape
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, shape.num_bytes)

    @classmethod
    def create(cls, shape: StagingShape) -> Staging:
        descriptor = os.memfd_create("katydid-staging")
        os.ftruncate(descriptor, shape.num_bytes)
        return cls(shape, descriptor)

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot, in place."""
        start = index * self.shape.slot_bytes
        return memoryview(self.memory)[start : start + self.shape.slot_bytes]
