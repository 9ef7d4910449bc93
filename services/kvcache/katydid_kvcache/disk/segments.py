"""Segment files: preallocated, cut into equal slots, read and written with direct I/O where the filesystem allows it.

A segment is one slab of the disk tier. Its file name carries its number and slot size (`00000003-2101248.seg`), so a
folder explains itself; a slab that changes its slot size gets a new file, and the old slots can't be mistaken for new.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from katydid_kvcache.blocks import PAGE_BYTES

__all__ = ["SegmentFiles"]

logger = logging.getLogger(__name__)


class SegmentFiles:
    """The segment files in `folder`, each of `segment_bytes`. All methods may be called from any thread."""

    def __init__(self, folder: Path, segment_bytes: int, *, direct: bool) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._open: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.direct = direct and _direct_io_works(folder)
        self._flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)

    def existing(self, limit: int) -> dict[int, int]:
        """Slot size by segment number of the files there; those of another size or from `limit` on are removed."""
        found: dict[int, int] = {}
        for path in sorted(self._folder.glob("*.seg")):
            number, _, slot_bytes = path.stem.partition("-")
            if not number.isdecimal() or not slot_bytes.isdecimal():
                continue
            size = int(slot_bytes)
            fits = path.stat().st_size == self._segment_bytes and PAGE_BYTES <= size <= self._segment_bytes
            if fits and int(number) < limit:
                found[int(number)] = size
            else:
                logger.warning("segment file that no longer fits the settings removed", extra={"path": str(path)})
                path.unlink()
        return found

    def write(self, number: int, slot_bytes: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write page-aligned buffers at `offset` of a segment, which is made if missing. Raises OSError."""
        descriptor = self._descriptor(number, slot_bytes, create=True)
        written = os.pwritev(descriptor, buffers, offset)
        if written != sum(len(buffer) for buffer in buffers):
            raise OSError(f"short write of {written} bytes to segment {number}")

    def read(self, number: int, slot_bytes: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill page-aligned buffers from `offset` of a segment. Raises OSError."""
        descriptor = self._descriptor(number, slot_bytes, create=False)
        received = os.preadv(descriptor, buffers, offset)
        if received != sum(len(buffer) for buffer in buffers):
            raise OSError(f"short read of {received} bytes from segment {number}")

    def sync(self, number: int) -> None:
        """Have the device keep what was written to a segment. Raises OSError."""
        with self._lock:
            entry = self._open.get(number)
        if entry is not None:
            os.fdatasync(entry[0])

    def close(self) -> None:
        with self._lock:
            for descriptor, _ in self._open.values():
                os.close(descriptor)
            self._open.clear()

    def _descriptor(self, number: int, slot_bytes: int, *, create: bool) -> int:
        with self._lock:
            entry = self._open.get(number)
            if entry is not None and entry[1] == slot_bytes:
                return entry[0]
            path = self._folder / f"{number:08d}-{slot_bytes}.seg"
            if create and not path.exists():
                # Whatever slot size the slab had before, nothing of it is in use any more.
                if entry is not None:
                    os.close(self._open.pop(number)[0])
                for old in self._folder.glob(f"{number:08d}-*.seg"):
                    old.unlink()
                self._create(path)
            descriptor = os.open(path, self._flags)
            self._open[number] = (descriptor, slot_bytes)
            return descriptor

    def _create(self, path: Path) -> None:
        """Make a whole file or none: a segment of the wrong size would be thrown away at the next start."""
        draft = path.with_suffix(".new")
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        try:
            os.posix_fallocate(descriptor, 0, self._segment_bytes)
            os.fsync(descriptor)
            os.rename(draft, path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        finally:
            os.close(descriptor)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _direct_io_works(folder: Path) -> bool:
    """Some filesystems refuse O_DIRECT when a file is opened, some only at the first write."""
    probe = folder / "direct-io.probe"
    page = mmap.mmap(-1, PAGE_BYTES)
    try:
        descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o640)
        try:
            return os.pwritev(descriptor, [page], 0) == PAGE_BYTES and os.preadv(descriptor, [page], 0) == PAGE_BYTES
        finally:
            os.close(descriptor)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
