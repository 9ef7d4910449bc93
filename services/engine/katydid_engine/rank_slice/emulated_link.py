"""A link that is not there: copies within one GPU's memory that take as long as what is sent would take on the way.

A copy engine carries them beside the step, as one carries what is sent between GPUs; they are as many more bytes as
memory is faster than the link, so that a step beside them loses more of its bandwidth than it would, never less. Where
there is another GPU, the copies can go to its memory: then the link is one, and nothing is multiplied.
"""

from __future__ import annotations

import torch

__all__ = ["EmulatedLink"]

_ROOM = 1 << 26
_TIMED = 16


class EmulatedLink:
    """One way out of a GPU.

    Args:
        far: another GPU to copy to.

    Attributes:
        stream: where what is sent goes, in order.
        on: whether it takes any time.
        carried: bytes since it was last set to 0, on or not.
    """

    def __init__(self, device: torch.device, bytes_per_s: float, far: torch.device | None = None) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.on, self.carried = True, 0
        self._from = torch.zeros(_ROOM, dtype=torch.uint8, device=device)
        self._to = torch.zeros(_ROOM, dtype=torch.uint8, device=far or device)
        self._times = 1.0 if far is not None else max(1.0, self._memory_speed() / bytes_per_s)

    def carry(self, nbytes: int) -> None:
        """By the present stream."""
        self.carried += nbytes
        left = round(nbytes * self._times) if self.on else 0
        while left > 0:
            part = min(left, _ROOM)
            self._to[:part].copy_(self._from[:part], non_blocking=True)
            left -= part

    def _memory_speed(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for event in (begin, end):
            for _ in range(_TIMED):
                self._to.copy_(self._from)
            event.record()
        end.synchronize()
        return _TIMED * _ROOM / (1e-3 * float(begin.elapsed_time(end)))
