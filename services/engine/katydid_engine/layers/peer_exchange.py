"""The split residual's exchange by kernels that write into each other's GPUs, where all ranks are GPUs of one host.

Between two blocks it is one kernel: summands are sent to the owners of their rows, summed, normed and sent to all, in
e4m3 where that is what the next block wants of them; only with fp8 transfers is anything rounded for the way. What does
not fit the peers' memory, or is not bf16, goes the general way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from katydid_engine.collectives import Collectives
from katydid_engine.layers.activations import Activations, Fp8Input, QuantizedRows
from katydid_engine.layers.exchange import BlockOutput, Entered, Exchange, Summand
from katydid_engine.layers.norm import RmsNorm

__all__ = ["PeerExchange", "RowPeers", "plain_rows", "scaled_by_token"]


class RowPeers(Protocol):
    """``katydid_kernels.peer_reduce.PeerReducer``, as far as it is used here; ``tokens`` is the most it takes."""

    @property
    def tokens(self) -> int: ...

    def all_reduce_many(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        quantized: bool = False,
        fp8: bool = False,
        own: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of the sum of every rank's x ``[T, hidden]`` and the residual, of which each keeps its share: the norm of all
        rows, its scales with ``fp8``, and this rank's share of the sum. ``own`` gets its share of the norm."""
        ...

    def quantized_all_gather(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Every rank's ``[m, hidden]`` -> all rows in e4m3 and their scales, fp32 ``[ranks * m]``."""
        ...

    def quantized_reduce_scatter(self, x: Tensor) -> Tensor:
        """``[ranks * m, hidden]`` of every rank -> this rank's m rows of their sum, bf16."""
        ...


class PeerExchange(Exchange):
    """An ``Exchange`` with sequence parallelism."""

    def __init__(self, collectives: Collectives, peers: RowPeers, *, fp8: bool = False) -> None:
        super().__init__(collectives, sequence_parallel=True, fp8=fp8)
        self._peers = peers

    def enter_for(self, consumer: Fp8Input | None, x: Activations, num_tokens: int) -> Activations:
        if not self._fp8 or not isinstance(x, Tensor) or not self._takes(x, len(x) * self.collectives.size):
            return super().enter_for(consumer, x, num_tokens)
        if consumer is not None and not scaled_by_token(consumer):
            return super().enter_for(consumer, x, num_tokens)
        values, scale = (rows[:num_tokens] for rows in self._peers.quantized_all_gather(x.contiguous()))
        return QuantizedRows(values, scale) if consumer is not None else plain_rows(values, scale, x.dtype)

    @property
    def quantises_first(self) -> bool:
        """The kernel that sends rows quantises them."""
        return False

    @property
    def parts(self) -> int:
        return 1

    def leave_in_parts(self, parts: Iterable[Tensor]) -> Tensor:
        (x,) = parts
        padded = F.pad(x, (0, 0, 0, -x.shape[0] % self.collectives.size))
        if not self._fp8 or not self._takes(padded, len(padded)):
            return super().leave_in_parts([x])
        return self._peers.quantized_reduce_scatter(padded.contiguous())

    def begin(self, embedded: Tensor) -> tuple[BlockOutput, Tensor | None]:
        if not self._takes(embedded, len(embedded)):
            return super().begin(embedded)
        return Summand(embedded), embedded.new_zeros((-(-len(embedded) // self.collectives.size), embedded.shape[1]))

    def leave_open(self, parts: Iterable[Tensor]) -> BlockOutput:
        (x,) = parts
        return Summand(x) if self._takes(x, len(x)) else self.leave(x)

    def through(
        self,
        norm: RmsNorm,
        consumer: Fp8Input | None,
        x: BlockOutput,
        residual: Tensor,
        num_tokens: int,
        *,
        keep: bool = False,
    ) -> tuple[Entered, Tensor]:
        if isinstance(x, Tensor):
            return super().through(norm, consumer, x, residual, num_tokens, keep=keep)
        by_token = consumer is not None and scaled_by_token(consumer)
        own = torch.empty_like(residual) if keep else None
        y, scale, total = self._peers.all_reduce_many(
            x.rows.contiguous(),
            residual,
            norm.weight,
            norm.eps,
            quantized=self._fp8,
            fp8=by_token or self._fp8,
            own=own,
        )
        self._clear_beyond(num_tokens, total, own)
        rows: Activations = y
        if scale is not None:
            rows = QuantizedRows(y, scale) if by_token else plain_rows(y, scale, residual.dtype)
        return Entered(rows, own), total

    def add_for(
        self, norm: RmsNorm, consumer: Fp8Input | None, x: BlockOutput, residual: Tensor
    ) -> tuple[Activations, Tensor]:
        if isinstance(x, Summand):
            x = self.leave(x.rows)
        return super().add_for(norm, consumer, x, residual)

    def last(self, norm: RmsNorm, x: BlockOutput, residual: Tensor, num_tokens: int) -> Tensor:
        if isinstance(x, Tensor):
            return super().last(norm, x, residual, num_tokens)
        y, _, _ = self._peers.all_reduce_many(x.rows.contiguous(), residual, norm.weight, norm.eps)
        # What is shared is written again with the next pass.
        return y.clone()

    def _clear_beyond(self, num_tokens: int, *shares: Tensor | None) -> None:
        """Rows of a share that only fill up are written by no kernel."""
        if num_tokens % self.collectives.size:
            for share in shares:
                if share is not None:
                    share[self.num_kept(num_tokens) :] = 0

    def _takes(self, x: Tensor, rows: int) -> bool:
        return x.dtype == torch.bfloat16 and rows <= self._peers.tokens


def scaled_by_token(consumer: Fp8Input) -> bool:
    return consumer.scale is None and consumer.group is None


def plain_rows(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.float() * scale[:, None]).to(dtype)
