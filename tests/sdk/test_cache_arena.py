"""A client's mapping of the shared memory: a GPU gets to see it where there is one, and it is mapped in full."""

from __future__ import annotations

import gc
import os

import pytest
from katydid_cache import ArenaMapping

SIZE = 1 << 20


def mapping() -> ArenaMapping:
    descriptor = os.memfd_create("test-arena")
    os.ftruncate(descriptor, SIZE)
    try:
        return ArenaMapping(descriptor, SIZE)
    finally:
        os.close(descriptor)


def test_other_processes_can_map_it_while_it_lives() -> None:
    arena = mapping()
    arena.prefault()
    arena.view[100] = 7
    path = f"/proc/self/fd/{arena.descriptor}"
    with open(path, "rb") as again:
        assert again.read(101)[100] == 7
    view, descriptor = arena.view, arena.descriptor
    del arena
    gc.collect()
    assert view[100] == 7, "what is viewed stays mapped"
    with pytest.raises(OSError):
        os.fstat(descriptor)
