"""What the kernels over peers compute, by gloo on CPUs: so that their benchmark can be tried where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from katydid_kernels import quantize_fp8
from katydid_kernels.peer_reduce import (
    add_rms_norm_of_ranks_reference,
    quantized_all_gather_reference,
    quantized_reduce_scatter_reference,
)
from torch import Tensor

__all__ = ["GlooReducer"]


class GlooReducer:
    """`PeerReducer`'s calls, for the world's ranks."""

    def __init__(self) -> None:
        self.memory = SimpleNamespace(rank=dist.get_rank(), size=dist.get_world_size())

    def check(self) -> None:
        """No rank is waited for in vain: gloo raises."""

    def all_reduce_few(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, fp8: bool = False, overlap: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        del overlap
        y, total = add_rms_norm_of_ranks_reference(self._everywhere(x), residual, weight, eps)
        return (*(quantize_fp8(y) if fp8 else (y, None)), total)

    def all_reduce_many(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, quantized: bool = False, fp8: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """``residual`` is this rank's share of the rows."""
        own = self.quantized_reduce_scatter(x) if quantized else sum(each.float() for each in self._everywhere(x))
        assert isinstance(own, Tensor)
        own = own if quantized else own.chunk(self.memory.size)[self.memory.rank]
        total = (own.float() + residual.float()).to(x.dtype)
        y = torch.cat(self._everywhere(add_rms_norm_of_ranks_reference([], total, weight, eps)[0]))
        return (*(quantize_fp8(y) if fp8 else (y, None)), total)

    def sum_few(self, x: Tensor) -> Tensor:
        return torch.stack(self._everywhere(x)).float().sum(0).to(x.dtype)

    def quantized_all_gather(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantized_all_gather_reference(self._everywhere(x))

    def quantized_reduce_scatter(self, x: Tensor) -> Tensor:
        return quantized_reduce_scatter_reference(self._everywhere(x), self.memory.rank)

    def _everywhere(self, x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in range(self.memory.size)]
        dist.all_gather(found, x.contiguous())
        return found
