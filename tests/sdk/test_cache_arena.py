"""A client's mapping of the shared memory: a GPU gets to see it where there is one, and it is mapped in full."""

from __future__ import annotations

import gc
import os
import sys
from types import SimpleNamespace

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


class Cuda:
    """Stands for torch.cuda."""

    def __init__(self, code: int, available: bool = True) -> None:
        self.code = code
        self.available = available
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []

    def is_available(self) -> bool:
        return self.available

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 3
        self.registered.append((address, size))
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        self.unregistered.append(address)


@pytest.mark.parametrize(("cuda", "seen"), [(Cuda(0), True), (Cuda(1), False), (Cuda(0, available=False), False)])
def test_a_gpu_sees_the_memory_until_it_is_dropped(monkeypatch: pytest.MonkeyPatch, cuda: Cuda, seen: bool) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    arena = mapping()
    assert arena.register_with_cuda() is seen
    assert [size for _, size in cuda.registered] == ([SIZE] if cuda.available else [])
    assert cuda.unregistered == []
    del arena
    gc.collect()
    assert cuda.unregistered == ([cuda.registered[0][0]] if seen else [])


def test_without_torch_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert mapping().register_with_cuda() is False
    assert "torch" not in sys.modules


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
