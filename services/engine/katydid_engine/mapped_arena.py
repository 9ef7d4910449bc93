"""A cache service's memory as one rank sees it: mapped, and on a GPU registered with CUDA piece by piece.

To register all of it takes seconds (0.05 s a GiB, and ten times as long while its pages are still to be zeroed), and so
does the way back; no step may wait for that. A thread does it, and has the kernel map the pages before: CUDA lets
nobody else in while it registers. A step that comes to a piece first registers that one itself, and the thread stands
back meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable

import torch
from katydid_kernels import register_memory, unregister_memory
from torch import Tensor

from katydid_engine.staging import ARENA_PAGE_BYTES

__all__ = ["MappedArena"]

_POPULATE_WRITE = 23  # madvise, since Linux 5.14
_PIECE_BYTES = 64 * 1024 * 1024
_LOOK_S = 0.5


class MappedArena:
    """``rows`` are uint8 ``[rows, object_bytes]``, one at every 4 KiB of the file ``path``, so they overlap.

    Raises OSError when it can't be mapped, RuntimeError when CUDA refuses it.
    """

    def __init__(self, path: str, size: int, object_bytes: int, device: torch.device) -> None:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(opened, size)
        finally:
            os.close(opened)
        self._flat = torch.frombuffer(memory, dtype=torch.uint8)
        self._device = device
        self._object_bytes = object_bytes
        self._registered: dict[int, Tensor] = {}
        self._lock = threading.Lock()
        # Unset while a step has pieces to register: a lock alone would go back to the thread that gives it up.
        self._no_step = threading.Event()
        self._no_step.set()
        self._closed = False
        rows = (size - object_bytes) // ARENA_PAGE_BYTES + 1
        self.rows = self._flat.as_strided((rows, object_bytes), (ARENA_PAGE_BYTES, 1))
        self.prepare((0,))  # by its first byte the memory is known as reachable
        threading.Thread(target=self._prepare_all, name="map-arena").start()

    def prepare(self, rows: Iterable[int]) -> None:
        """Have these rows ready for the device."""
        if self._device.type != "cuda":
            return
        missing = [piece for row in rows for piece in self._pieces_of(row) if piece not in self._registered]
        if not missing:
            return
        self._no_step.clear()
        try:
            for piece in missing:
                self._register(piece)
        finally:
            self._no_step.set()

    def close(self) -> None:
        """Forget the memory, in the end; nothing on the device may still use it."""
        self._closed = True
        if self._device.type == "cuda":
            threading.Thread(target=self._forget_all, name="forget-arena").start()

    def _pieces_of(self, row: int) -> range:
        first = row * ARENA_PAGE_BYTES
        return range(first // _PIECE_BYTES, (first + self._object_bytes - 1) // _PIECE_BYTES + 1)

    def _prepare_all(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        madvise = ctypes.CDLL(None).madvise
        for piece in range(-(-self._flat.numel() // _PIECE_BYTES)):
            memory = self._flat[piece * _PIECE_BYTES :][:_PIECE_BYTES]
            refused = madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), _POPULATE_WRITE)
            if refused and self._device.type != "cuda":
                return
            while not self._no_step.wait(_LOOK_S) and not (self._closed or _ending()):
                pass
            if self._closed or _ending():
                return
            if self._device.type == "cuda":
                self._register(piece)

    def _forget_all(self) -> None:
        torch.cuda.set_device(self._device)
        with self._lock:
            while self._registered and not _ending():
                _, memory = self._registered.popitem()
                unregister_memory(memory)

    def _register(self, piece: int) -> None:
        with self._lock:
            if piece not in self._registered and not self._closed:
                memory = self._flat[piece * _PIECE_BYTES :][:_PIECE_BYTES]
                register_memory(memory)
                self._registered[piece] = memory


def _ending() -> bool:
    """Whether the process ends: it waits for threads, which a call into CUDA must not be cut off from."""
    return not threading.main_thread().is_alive()
