"""What a rank sees of blocks on their way: the staging buffer, and the memory of a cache service on the same host.

The service's memory is mapped when a slot of it first appears in a plan, through the face's descriptor, so that blocks
move between it and the pages without a copy on the way. A restarted service has new memory: the old mapping is dropped
when slots of the new one alone appear.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import torch
from katydid_kernels import register_memory, unregister_memory
from torch import Tensor

from katydid_engine.mapped_arena import MappedArena
from katydid_engine.plan import Transfer
from katydid_engine.staging import arena_place

__all__ = ["SlotMemory"]


class SlotMemory:
    """``staging`` is uint8 ``[slots, object_bytes]``; ``face`` the process whose descriptors slots name.

    ``before_drop`` is called before memory is dropped: transfers must be over when it returns.
    """

    def __init__(self, staging: Tensor, device: torch.device, *, face: int | None = None) -> None:
        self.before_drop: Callable[[], None] = lambda: None
        self._staging = staging
        self._device = device
        self._face = os.getppid() if face is None else face
        self._arenas: dict[tuple[int, int], MappedArena] = {}
        if device.type == "cuda":
            register_memory(staging)

    def groups(self, transfers: Sequence[Transfer]) -> Iterator[tuple[Tensor, list[int]]]:
        """Transfers by memory: objects uint8 ``[rows, object_bytes]``, and the places in ``transfers`` of those in it.

        ``row`` tells the row of a slot. Raises OSError when it can't be mapped, RuntimeError when CUDA refuses it.
        """
        by_descriptor: dict[int, list[int]] = {}
        for place, transfer in enumerate(transfers):
            descriptor, _ = arena_place(transfer.slot) or (0, 0)
            by_descriptor.setdefault(descriptor, []).append(place)
        arenas = {descriptor: self._file(descriptor) for descriptor in by_descriptor if descriptor}
        if arenas and not self._arenas.keys() <= {file for _, file, _ in arenas.values()}:
            self._drop({file for _, file, _ in arenas.values()})
        for descriptor, places in by_descriptor.items():
            if descriptor:
                arena = self._map(*arenas[descriptor])
                arena.prepare(self.row(transfers[place].slot) for place in places)
                yield arena.rows, places
            else:
                yield self._staging, places

    @staticmethod
    def row(slot: int) -> int:
        """Row of a slot in the objects of its group."""
        _, row = arena_place(slot) or (0, slot)
        return row

    def close(self) -> None:
        """Drops all memory."""
        self._drop(set())
        if self._device.type == "cuda":
            unregister_memory(self._staging)

    def _file(self, descriptor: int) -> tuple[str, tuple[int, int], int]:
        path = f"/proc/{self._face}/fd/{descriptor}"
        status = os.stat(path)
        # A descriptor's number is used again, the file behind it is not while it is mapped here.
        return path, (status.st_dev, status.st_ino), status.st_size

    def _map(self, path: str, file: tuple[int, int], size: int) -> MappedArena:
        if file not in self._arenas:
            self._arenas[file] = MappedArena(path, size, self._staging.shape[1], self._device)
        return self._arenas[file]

    def _drop(self, kept: set[tuple[int, int]]) -> None:
        self.before_drop()
        for file in self._arenas.keys() - kept:
            self._arenas.pop(file).close()
