"""What ranks of a TP group tell each other around a block: the one place that knows whether the residual is split.

Without sequence parallelism every rank keeps the whole residual and a block's summands are all-reduced. With it each
rank keeps 1/tp of the tokens: a block gathers its input and reduce-scatters its output, and the norms in between work
on 1/tp of the rows.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from katydid_engine.collectives import Collectives

__all__ = ["Exchange"]


class Exchange:
    """Moves activations ``[T, n]`` between blocks and the residual stream."""

    def __init__(self, collectives: Collectives, *, sequence_parallel: bool) -> None:
        self.collectives = collectives
        self.sequence_parallel = sequence_parallel

    def enter(self, x: Tensor, num_tokens: int) -> Tensor:
        """The residual stream's rows -> all ``num_tokens`` rows, on every rank."""
        if not self.sequence_parallel:
            return x
        return self.collectives.all_gather(x, 0)[:num_tokens]

    def leave(self, x: Tensor) -> Tensor:
        """Summands of all rows, one per rank -> their sum, on the rows this rank keeps."""
        if not self.sequence_parallel:
            return self.collectives.all_reduce(x)
        padding = -x.shape[0] % self.collectives.size
        return self.collectives.reduce_scatter(F.pad(x, (0, 0, 0, padding)))

    def split(self, x: Tensor) -> Tensor:
        """Rows every rank has -> the rows this rank keeps."""
        if not self.sequence_parallel:
            return x
        padding = -x.shape[0] % self.collectives.size
        return F.pad(x, (0, 0, 0, padding)).chunk(self.collectives.size)[self.collectives.rank]
