"""Sums over a TP group by kernels that write into each other's GPUs, where few rows make the wait the cost.

The sum between a feed-forward block and the norm behind it is made in the norm's kernel, and quantised there; the other
sums are kernels of their own, for what follows them is fused otherwise. More rows than the peers' memory has room for
go the general way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from katydid_engine.collectives import Collectives
from katydid_engine.layers.activations import Activations, Fp8Input, QuantizedRows
from katydid_engine.layers.exchange import BlockOutput, Exchange, Summand
from katydid_engine.layers.norm import RmsNorm

__all__ = ["FewRowPeers", "FewRowsExchange"]


class FewRowPeers(Protocol):
    """``katydid_kernels.peer_reduce.PeerReducer``, as far as it is used here; ``few_tokens`` is the most it takes."""

    @property
    def few_tokens(self) -> int: ...

    def sum_few(self, x: Tensor, *, overlap: bool = False) -> Tensor:
        """Every rank's bf16 ``[T, hidden]`` -> their sum."""
        ...

    def all_reduce_few(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, fp8: bool = False, overlap: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of the sum of every rank's x and the residual: its norm, the norm's scales with ``fp8``, and the sum."""
        ...


class FewRowsExchange(Exchange):
    """An ``Exchange`` that splits no residual."""

    def __init__(self, collectives: Collectives, peers: FewRowPeers) -> None:
        super().__init__(collectives, sequence_parallel=False)
        self._peers = peers

    def leave_in_parts(self, parts: Iterable[Tensor]) -> Tensor:
        (x,) = parts
        if not self._takes(x):
            return super().leave_in_parts([x])
        return self._peers.sum_few(x.contiguous(), overlap=True)

    def begin(self, embedded: Tensor) -> tuple[BlockOutput, Tensor | None]:
        if not self._takes(embedded):
            return super().begin(embedded)
        return Summand(embedded), torch.zeros_like(embedded)

    def leave_open(self, parts: Iterable[Tensor]) -> BlockOutput:
        (x,) = parts
        return Summand(x) if self._takes(x) else self.leave(x)

    def add_for(
        self, norm: RmsNorm, consumer: Fp8Input | None, x: BlockOutput, residual: Tensor
    ) -> tuple[Activations, Tensor]:
        if isinstance(x, Tensor):
            return super().add_for(norm, consumer, x, residual)
        whole_rows = consumer is not None and consumer.scale is None and consumer.group is None
        y, scale, total = self._peers.all_reduce_few(
            x.rows.contiguous(), residual, norm.weight, norm.eps, fp8=whole_rows, overlap=True
        )
        if scale is not None:
            return QuantizedRows(y, scale), total
        return y if consumer is None else consumer.quantize(y), total

    def _takes(self, x: Tensor) -> bool:
        return x.dtype == torch.bfloat16 and len(x) <= self._peers.few_tokens
