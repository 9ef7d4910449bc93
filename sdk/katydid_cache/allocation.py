"""Keeps the memory of gRPC messages mapped between uses: frames of 1 MiB move twice as fast.

glibc maps every allocation above 128 KiB afresh and unmaps it on release, so each frame pays for touching 256 new
pages, which is slower than copying into them. This raises the thresholds for the whole process: call it once in a
process that moves blocks (the cache service, an engine's gRPC face).
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_buffers_mapped"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MIB = 1024 * 1024


def keep_buffers_mapped() -> bool:
    """Serve allocations up to 32 MiB from the heap and keep up to 256 MiB of it; False where libc is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_M_MMAP_THRESHOLD, 32 * _MIB), (_M_TRIM_THRESHOLD, 256 * _MIB), (_M_TOP_PAD, 64 * _MIB))
    return all(bool(mallopt(option, value)) for option, value in wanted)
