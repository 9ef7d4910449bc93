"""A link that is not there: copies to the host's memory that take as long as what is sent would take on the way.

A copy engine carries them beside the step, as one carries what is sent between GPUs; a copy within a GPU would need its
multiprocessors. They are as many fewer bytes as the way to the host is slower than the link, so that a step beside them
loses less of its own memory's bandwidth than it would: at most what the link is of it, a tenth each way. Where there is
another GPU, the copies can go to its memory: then the link is one, and as many bytes are copied as are sent.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

__all__ = ["EmulatedLink"]

_ROOM = 1 << 26
_TIMED = 4


class EmulatedLink:
    """One way out of a GPU.

    Args:
        far: a GPU to copy to.

    Attributes:
        stream: where what is sent goes, in order.
        on: whether it takes any time.
        carried: bytes since it was last set to 0, on or not.
    """

    def __init__(self, device: torch.device, bytes_per_s: float, far: torch.device | None = None) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.on, self.carried = True, 0
        self._from = torch.zeros(_ROOM, dtype=torch.uint8, device=device)
        if far is None:
            self._to = torch.zeros(_ROOM, dtype=torch.uint8, pin_memory=True)
            self._times = self._speed() / bytes_per_s
        else:
            self._to = torch.zeros(_ROOM, dtype=torch.uint8, device=far)
            self._to.copy_(self._from)  # from here on one GPU may write to the other
            self._times = 1.0

    def carry(self, nbytes: int) -> None:
        """By the present stream."""
        self.carried += nbytes
        left = round(nbytes * self._times) if self.on else 0
        while left > 0:
            part = min(left, _ROOM)
            _copy(self._to, self._from, part)
            left -= part

    def _speed(self) -> float:
        """Bytes a second of the copies."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for event in (begin, end):
            for _ in range(_TIMED):
                _copy(self._to, self._from, _ROOM)
            event.record()
        end.synchronize()
        return _TIMED * _ROOM / (1e-3 * float(begin.elapsed_time(end)))


def _copy(to: Tensor, source: Tensor, nbytes: int) -> None:
    """By the present stream. Torch's own would wait for the other GPU's stream, which no capture allows."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    addresses = ctypes.c_uint64(to.data_ptr()), ctypes.c_uint64(source.data_ptr())
    code = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync(*addresses, ctypes.c_size_t(nbytes), stream)
    if code:
        raise RuntimeError(f"cuMemcpyAsync failed with CUDA error {code}")
