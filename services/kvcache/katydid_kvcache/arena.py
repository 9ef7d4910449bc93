"""Host memory of the cache: one anonymous memfd mapping, cut into slots by a SlabAllocator.

The mapping is a file descriptor without a name, so it can be passed to clients of the same host and can't be left
behind. Touching fresh pages costs ten times what copying into them does, so a thread pre-faults them after the start,
in huge pages where the host allows them for shared memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path

__all__ = ["Arena", "host_memory_bytes"]

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_PREFAULT_BYTES = 16 * 1024 * 1024
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_memory_bytes() -> int:
    """Memory that this process can have at most: the host's, or its container's limit."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return installed
    return min(installed, int(limit)) if limit.isdigit() else installed


class Arena:
    """`bytes` of shared memory in whole slabs. Raises OSError when the host refuses the memory."""

    def __init__(self, slabs: int, slab_bytes: int) -> None:
        self.bytes = slabs * slab_bytes
        self._slab_bytes = slab_bytes
        self.fd = os.memfd_create("katydid-kvcache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.bytes)
        # Whoever got the descriptor could cut the memory off under all others, who would die of it.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.fd, self.bytes)
        self._view = memoryview(self._map)
        self._closing = False

    def view(self, slab: int, offset: int, size: int) -> memoryview:
        """`size` writable bytes from `offset` of a slab."""
        start = slab * self._slab_bytes + offset
        return self._view[start : start + size]

    def prefault(self) -> None:
        """Have the kernel back every page; runs in a thread and stops at `close`."""
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # Where the kernel or its settings have none, pages stay small.
        madvise(ctypes.c_void_p(address), ctypes.c_size_t(self.bytes), _MADV_HUGEPAGE)
        for start in range(0, self.bytes, _PREFAULT_BYTES):
            size = min(_PREFAULT_BYTES, self.bytes - start)
            if self._closing or madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                return  # a kernel before 5.14 has no such advice: pages are backed on first touch

    def close(self) -> None:
        """Stop pre-faulting and close the descriptor; the mapping goes with its last view."""
        self._closing = True
        os.close(self.fd)
