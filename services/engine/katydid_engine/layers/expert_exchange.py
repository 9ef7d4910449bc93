"""Sends rows to the ranks of their experts and brings the results home.

A row goes once to each rank that has any of its experts, with its experts and weights beside it; that rank sums what
its experts make of it, so one row comes back from each. Two forms, equal in result:

    counted     exactly the rows that have somewhere to go; the ranks tell each other how many first, which the host
                has to read: the throughput form
    fixed       ``capacity`` rows to every rank, filled up with rows that go to no expert: every size is known
                beforehand and nothing is read from the device, so that a CUDA graph can hold it: the latency form
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from katydid_engine.collectives import Collectives
from katydid_engine.layers.activations import Activations, Fp8Input
from katydid_engine.layers.row_bytes import RowFormat
from katydid_engine.layers.steps import Steps

__all__ = ["ExpertExchange"]


class ExpertExchange:
    """One layer's way to its experts.

    Args:
        group: the ranks that hold the experts between them.
        slots: experts on each rank, copies included.
        consumer: what the experts want of their rows.
        fp8: plain rows are quantised for the way, there and back.

    Attributes:
        capacity: rows to each rank in the fixed form, at least the rows any rank has; None for the counted form.
    """

    def __init__(
        self,
        group: Collectives,
        slots: int,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        consumer: Fp8Input | None,
        fp8: bool,
    ) -> None:
        self.capacity: int | None = None
        self._group = group
        self._slots = slots
        self._there = RowFormat(hidden_size, dtype, consumer=consumer, fp8=fp8)
        self._back = RowFormat(hidden_size, torch.float32 if fp8 else dtype, fp8=fp8)
        self._hidden = hidden_size

    @property
    def nowhere(self) -> int:
        """An id that no rank has: of rows that only fill up."""
        return self._slots * self._group.size

    @property
    def row_bytes(self) -> int:
        """Of a row without what travels behind it: its slots, int32 ``[top_k]``, and weights, fp32 ``[top_k]``."""
        return self._there.bytes

    def run(
        self,
        rows: Activations,
        weights: Tensor,
        ids: Tensor,
        experts: Callable[[Activations, Tensor, Tensor], Tensor],
        beside: Callable[[], Tensor | None],
    ) -> Steps[Tensor]:
        """The sum over each row's experts, fp32 ``[T, hidden]``, plus what ``beside`` yields.

        Args:
            rows: ``[T, hidden]``, of this rank alone.
            weights: fp32 ``[T, top_k]``.
            ids: int32 ``[T, top_k]``, slots; ``nowhere`` for none.
            experts: this rank's, of rows, weights and slots.
            beside: computed while the rows are under way.
        """
        top_k = ids.shape[1]
        goes = F.one_hot((ids // self._slots).long(), self._group.size + 1)[:, :, :-1].amax(1)
        order = goes.cumsum(0) - 1
        message = torch.cat((self._there.encode(rows), _bytes(ids), _bytes(weights)), dim=1)
        # ``place[t, r]``: which of the rows sent is row t to rank r; one beyond the last where it does not go there.
        send: list[int] | None = None
        receive: list[int] | None = None
        if self.capacity is None:
            counts = goes.sum(0)
            told = self._group.all_to_all(counts)
            send = counts.tolist()
            receive = told.wait().tolist()
            total = sum(send)
            starts = counts.cumsum(0) - counts
        else:
            total = self.capacity * self._group.size
            starts = torch.arange(self._group.size, device=ids.device) * self.capacity
        place = torch.where(goes > 0, order + starts, total)
        outgoing = message.new_empty((total + 1, message.shape[1]))
        if self.capacity is not None:
            outgoing[:] = 0
            outgoing[:, self._there.bytes : -4 * top_k] = _bytes(ids.new_full((1, top_k), self.nowhere))
        for rank in range(self._group.size):
            outgoing[place[:, rank]] = message
        under_way = self._group.all_to_all(outgoing[:total], send, receive)
        extra = beside()
        yield
        arrived = under_way.wait()
        computed = experts(
            self._there.decode(arrived[:, : self._there.bytes]),
            arrived[:, -4 * top_k :].contiguous().view(torch.float32),
            arrived[:, self._there.bytes : -4 * top_k].contiguous().view(torch.int32),
        )
        returning = self._group.all_to_all(self._back.encode(computed), receive, send)
        yield
        home = self._back.decode(returning.wait())
        assert isinstance(home, Tensor)
        home = F.pad(home, (0, 0, 0, 1))
        result = torch.zeros((len(ids), self._hidden), device=home.device)
        for rank in range(self._group.size):
            # In the order of ranks: the sum does not depend on what arrives first.
            result += home[place[:, rank]]
        return result if extra is None else result + extra


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)
