"""Memory of GPUs that are not there: kernels that sum and send rows write beside themselves and wait for nobody.

What a rank would write into the others' memory it writes into as many buffers of its own, so that every byte is
quantised, written and read once as it would be; only the links are missing.
"""

from __future__ import annotations

from typing import Any

import torch
from katydid_kernels import add_rms_norm, add_rms_norm_quantize
from katydid_kernels.peer_reduce import PeerReducer, emulated_peers
from torch import Tensor

from katydid_engine.rank_slice.absent_ranks import AbsentRanks

__all__ = ["AbsentPeers"]


class AbsentPeers(PeerReducer):
    """Of the group ``ranks``, whose traffic it counts; ``tokens`` is the most that a call takes."""

    def __init__(self, ranks: AbsentRanks, hidden: int, tokens: int, device: torch.device) -> None:
        size = self.nbytes(ranks.size, hidden, few_tokens=0, tokens=tokens)
        super().__init__(emulated_peers(ranks.size, size, device)[ranks.rank], hidden, few_tokens=0, tokens=tokens)
        self._ranks = ranks
        self._seen: set[tuple[int, int]] = set()

    def all_reduce_few(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        fp8: bool = False,
        overlap: bool = False,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        self._count("sum of few", len(x) * (self.memory.size - 1), quantized=False)
        if not fp8:
            y, total = add_rms_norm(x, residual, weight, eps)
            return y, None, total
        return add_rms_norm_quantize(x, residual, weight, eps)

    def sum_few(self, x: Tensor, *, overlap: bool = False) -> Tensor:  # noqa: ARG002
        self._count("sum of few", len(x) * (self.memory.size - 1), quantized=False)
        return x

    def all_reduce_many(
        self, x: Tensor, *arguments: Any, quantized: bool = False, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        self._count("reduce and gather", 2 * (len(x) - self._share_of(x)), quantized)
        y, scale, total = super().all_reduce_many(x, *arguments, quantized=quantized, **options)
        for rows in (y, scale):
            if rows is not None:
                self._spread(rows)
        return y, scale, total

    def quantized_all_gather(self, x: Tensor, *, overlap: bool = False) -> tuple[Tensor, Tensor]:
        self._count("gather", len(x) * (self.memory.size - 1), quantized=True)
        values, scale = super().quantized_all_gather(x, overlap=overlap)
        self._spread(values)
        self._spread(scale)
        return values, scale

    def quantized_reduce_scatter(self, x: Tensor, *, overlap: bool = False) -> Tensor:
        self._count("reduce-scatter", len(x) - self._share_of(x), quantized=True)
        return super().quantized_reduce_scatter(x, overlap=overlap)

    def _many(self, *arguments: Any, **options: Any) -> None:
        super()._many(*arguments, **(options | {"sync": False}))

    def _gather(self, *arguments: Any, **options: Any) -> None:
        super()._gather(*arguments, **(options | {"sync": False}))

    def _scatter(self, *arguments: Any, **options: Any) -> None:
        super()._scatter(*arguments, **(options | {"sync": False}))

    def _spread(self, rows: Tensor) -> None:
        """This rank's share stands in for the others', from the first time on: nobody else writes there."""
        key = (rows.data_ptr(), len(rows))
        if key in self._seen:
            return
        self._seen.add(key)
        share = self._share_of(rows)
        own = rows[self.memory.rank * share : (self.memory.rank + 1) * share].clone()
        for first in range(0, len(rows), share):
            part = rows[first : first + share]
            part.copy_(own[: len(part)])

    def _share_of(self, rows: Tensor) -> int:
        return -(-len(rows) // self.memory.size)

    def _count(self, name: str, rows: int, quantized: bool) -> None:
        self._ranks.count(f"peers {name}", rows * (self.hidden + 4 if quantized else 2 * self.hidden))
