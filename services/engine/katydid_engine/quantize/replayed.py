"""Work that is done over and over on tensors of one shape, on a GPU replayed as a graph: a step of a small model's
optimiser is thousands of short kernels, which take longer to launch than to run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Replayed"]

_BEFORE = 3  # calls that find out what is allocated: the optimiser's moments, workspaces of libraries


class Replayed:
    """Calls ``work``; on a GPU, from the fourth call on, replays what the fourth did.

    Args:
        work: of one tensor, that always has the same shape; what it returns is overwritten by the next call. It must
            depend on nothing on the host that changes.
    """

    def __init__(self, work: Callable[[Tensor], Tensor]) -> None:
        self._work = work
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._rows: Tensor | None = None
        self._made: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        self._calls += 1
        if rows.device.type != "cuda":
            return self._work(rows)
        if self._calls <= _BEFORE:
            side = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                made = self._work(rows)
            torch.cuda.current_stream().wait_stream(side)
            return made
        if self._graph is None or self._rows is None:
            self._graph, self._rows = torch.cuda.CUDAGraph(), rows.clone()
            with torch.cuda.graph(self._graph):
                self._made = self._work(self._rows)
        self._rows.copy_(rows)
        self._graph.replay()
        assert self._made is not None
        return self._made
