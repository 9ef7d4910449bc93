"""Memory that the face and its workers share for blocks on their way: slots of one store object each.

The first ``write_slots`` are packed by the workers and emptied by the face, the rest are filled by the face and
unpacked by the workers. Who may touch a slot is settled by messages; the memory itself holds bytes alone.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

__all__ = ["Staging", "StagingShape"]


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
