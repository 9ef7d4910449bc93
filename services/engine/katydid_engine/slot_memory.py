"""What a rank sees of blocks on their way: the staging buffer, and the memory of a cache service on the same host.

The service's memory is mapped when a slot of it first appears in a plan, through the face's descriptor, and registered
with CUDA on a GPU, so that blocks move between it and the pages without a copy on the way. A restarted service has new
memory: the old mapping is dropped when a slot of the new one appears.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Sequence

import torch
from katydid_kernels import register_memory, unregister_memory
from torch import Tensor

from katydid_engine.plan import Transfer
from katydid_engine.staging import ARENA_PAGE_BYTES, arena_place

__all__ = ["SlotMemory"]

_POPULATE_WRITE = 23  # madvise, since Linux 5.14
_PIECE_BYTES = 16 * 1024 * 1024


class SlotMemory:
    """``staging`` is uint8 ``[slots, object_bytes]``; ``face`` the process whose descriptors slots name."""

    def __init__(self, staging: Tensor, device: torch.device, *, face: int | None = None) -> None:
        self._staging = staging
        self._device = device
        self._face = os.getppid() if face is None else face
        self._arena: tuple[tuple[int, int], Tensor] | None = None
        self._registered: Tensor | None = None

    def groups(self, transfers: Sequence[Transfer]) -> Iterator[tuple[Tensor, list[int]]]:
        """Transfers by memory: objects uint8 ``[rows, object_bytes]``, and the places in ``transfers`` of those in it.

        ``row`` tells the row of a slot. Rows of the service's memory begin every 4 KiB, so they overlap. Raises OSError
        when it can't be mapped, RuntimeError when CUDA refuses it.
        """
        by_descriptor: dict[int, list[int]] = {}
        for place, transfer in enumerate(transfers):
            descriptor, _ = arena_place(transfer.slot) or (0, 0)
            by_descriptor.setdefault(descriptor, []).append(place)
        for descriptor, places in by_descriptor.items():
            yield self._map(descriptor) if descriptor else self._staging, places

    @staticmethod
    def row(slot: int) -> int:
        """Row of a slot in the objects of its group."""
        _, row = arena_place(slot) or (0, slot)
        return row

    def _map(self, descriptor: int) -> Tensor:
        path = f"/proc/{self._face}/fd/{descriptor}"
        status = os.stat(path)
        # A descriptor's number is used again, the file behind it is not while it is mapped here.
        file = (status.st_dev, status.st_ino)
        if self._arena is None or self._arena[0] != file:
            self._drop()
            self._arena = file, self._rows(path, status.st_size)
        return self._arena[1]

    def _drop(self) -> None:
        if self._registered is not None:
            unregister_memory(self._registered)
        self._arena = self._registered = None

    def _rows(self, path: str, size: int) -> Tensor:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(opened, size)
        finally:
            os.close(opened)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        if self._device.type == "cuda":
            register_memory(flat)
            self._registered = flat
        else:
            # Otherwise a step would wait for the kernel to map each page it packs into for the first time.
            threading.Thread(target=_map_pages, args=(flat,), name="map-arena", daemon=True).start()
        object_bytes = self._staging.shape[1]
        rows = (size - object_bytes) // ARENA_PAGE_BYTES + 1
        return flat.as_strided((rows, object_bytes), (ARENA_PAGE_BYTES, 1))


def _map_pages(memory: Tensor) -> None:
    madvise = ctypes.CDLL(None).madvise
    for start in range(0, memory.numel(), _PIECE_BYTES):
        size = min(_PIECE_BYTES, memory.numel() - start)
        if madvise(ctypes.c_void_p(memory.data_ptr() + start), ctypes.c_size_t(size), _POPULATE_WRITE):
            return
