"""The split residual's exchange by kernels that write into each other's GPUs, where all ranks are GPUs of one host.

Rows are quantised, sent and summed in one kernel each; what does not fit the peers' memory, or is not bf16, goes the
general way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from katydid_engine.collectives import Collectives
from katydid_engine.layers.activations import Activations, Fp8Input, QuantizedRows
from katydid_engine.layers.exchange import Exchange

__all__ = ["PeerExchange", "RowPeers"]


class RowPeers(Protocol):
    """``katydid_kernels.peer_reduce.PeerReducer``, as far as it is used here; ``tokens`` is the most it takes."""

    @property
    def tokens(self) -> int: ...

    def quantized_all_gather(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Every rank's ``[m, hidden]`` -> all rows in e4m3 and their scales, fp32 ``[ranks * m]``."""
        ...

    def quantized_reduce_scatter(self, x: Tensor) -> Tensor:
        """``[ranks * m, hidden]`` of every rank -> this rank's m rows of their sum, bf16."""
        ...


class PeerExchange(Exchange):
    """An ``Exchange`` with sequence parallelism and fp8 transfers."""

    def __init__(self, collectives: Collectives, peers: RowPeers) -> None:
        super().__init__(collectives, sequence_parallel=True, fp8=True)
        self._peers = peers

    def enter_for(self, consumer: Fp8Input | None, x: Activations, num_tokens: int) -> Activations:
        if not isinstance(x, Tensor) or not self._takes(x, len(x) * self.collectives.size):
            return super().enter_for(consumer, x, num_tokens)
        if consumer is not None and (consumer.scale is not None or consumer.group is not None):
            return super().enter_for(consumer, x, num_tokens)
        values, scale = (rows[:num_tokens] for rows in self._peers.quantized_all_gather(x.contiguous()))
        if consumer is None:
            return (values.float() * scale[:, None]).to(x.dtype)
        return QuantizedRows(values, scale)

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
        if not self._takes(padded, len(padded)):
            return super().leave_in_parts([x])
        return self._peers.quantized_reduce_scatter(padded.contiguous())

    def _takes(self, x: Tensor, rows: int) -> bool:
        return x.dtype == torch.bfloat16 and rows <= self._peers.tokens
