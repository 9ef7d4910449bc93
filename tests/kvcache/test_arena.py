"""The arena: views lie where the slabs are, other mappings of its descriptor see the same bytes."""

from __future__ import annotations

import mmap
import os
import threading

import pytest
from katydid_kvcache.arena import Arena

SLAB = 1 << 20


def test_views_share_memory_with_other_mappings() -> None:
    arena = Arena(3, SLAB)
    arena.view(1, 4096, 5)[:] = b"bytes"
    with mmap.mmap(arena.fd, arena.bytes) as other:
        assert other[SLAB + 4096 : SLAB + 4101] == b"bytes"
    arena.close()


def test_prefault_backs_every_page_and_changes_none() -> None:
    arena = Arena(4, SLAB)
    arena.view(2, 0, 4)[:] = b"kept"
    arena.prefault()
    assert os.fstat(arena.fd).st_blocks * 512 == arena.bytes
    assert arena.view(2, 0, 4) == b"kept"
    arena.close()


def test_closing_stops_the_prefault() -> None:
    arena = Arena(64, SLAB)
    thread = threading.Thread(target=arena.prefault)
    thread.start()
    arena.close()
    thread.join(10)
    assert not thread.is_alive()


def test_nobody_can_cut_the_memory_off_under_the_others() -> None:
    arena = Arena(2, SLAB)
    for size in (0, SLAB, 4 * SLAB):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    arena.close()
