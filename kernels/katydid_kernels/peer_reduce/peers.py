"""Memory that all ranks of a group can address: symmetric memory of several GPUs, or plain tensors of one.

Ranks emulated on one GPU run as streams of one process. Their kernels must all fit the GPU at once, for they wait for
one another, and their launches must not queue behind each other (CUDA_DEVICE_MAX_CONNECTIONS=32).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PeerMemory", "emulated_peers", "symmetric_peers"]


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One rank's view of buffers of equal size, one a rank.

    Attributes:
        rank: this rank.
        buffers: uint8 ``[bytes]`` of every rank, zeroed.
        pointers: int64 ``[ranks]`` on the rank's device, their addresses.
    """

    rank: int
    buffers: tuple[Tensor, ...]
    pointers: Tensor

    @property
    def own(self) -> Tensor:
        return self.buffers[self.rank]

    @property
    def size(self) -> int:
        return len(self.buffers)


def emulated_peers(ranks: int, nbytes: int, device: torch.device | str) -> list[PeerMemory]:
    """The views of ``ranks`` ranks that share one device."""
    buffers = tuple(torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(ranks))
    pointers = _addresses(buffers, device)
    return [PeerMemory(rank, buffers, pointers) for rank in range(ranks)]


def symmetric_peers(group: torch.distributed.ProcessGroup, nbytes: int, device: torch.device) -> PeerMemory:
    """This rank's view; collective over the group, whose ranks are GPUs of one host."""
    from torch.distributed import _symmetric_memory

    own = _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    own.zero_()
    handle = _symmetric_memory.rendezvous(own, group)
    ranks = range(group.size())
    buffers = tuple(own if r == group.rank() else handle.get_buffer(r, (nbytes,), torch.uint8) for r in ranks)
    torch.cuda.synchronize(device)
    torch.distributed.barrier(group)
    return PeerMemory(group.rank(), buffers, _addresses(buffers, device))


def _addresses(buffers: tuple[Tensor, ...], device: torch.device | str) -> Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device)
