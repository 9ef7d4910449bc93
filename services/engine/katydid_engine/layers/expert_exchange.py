"""Sends rows to the ranks of their experts and brings the results home.

A row goes once to each rank that has any of its experts, with its experts and weights beside it; that rank sums what
its experts make of it, so one row comes back from each. Two forms, equal in result:

    counted     exactly the rows that have somewhere to go; the ranks tell each other how many first, which the host
                has to read: the throughput form. It pauses before it reads, so that a device that has another part of
                the batch to compute is not waited for with nothing to do
    fixed       ``capacity`` rows to every rank, filled up with rows that go to no expert: every size is known
                beforehand and nothing is read from the device, so that a CUDA graph can hold it: the latency form
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from katydid_kernels import gather_rows, route_rows, scatter_rows, split_rows
from torch import Tensor

from katydid_engine.collectives import Collectives
from katydid_engine.host_copies import Arriving, to_host
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
        self._dtype = dtype

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
        """The sum over each row's experts, ``[T, hidden]``, plus what ``beside`` yields.

        Args:
            rows: ``[T, hidden]``, of this rank alone.
            weights: fp32 ``[T, top_k]``.
            ids: int32 ``[T, top_k]``, slots; ``nowhere`` for none.
            experts: this rank's, of rows, weights and slots.
            beside: computed while the rows are under way.
        """
        top_k, capacity = ids.shape[1], self.capacity
        order, counts = route_rows(ids, self._slots, self._group.size)
        send: list[int] | None = None
        receive: list[int] | None = None
        if capacity is None:
            told = to_host(torch.cat((counts, self._group.all_to_all(counts).wait())))
            arriving = Arriving(counts.device)
            yield
            arriving.wait()
            send, receive = (part.tolist() for part in told.chunk(2))
            total = sum(send)
        else:
            total = self._group.size * capacity
        values, scales = self._there.parts(rows)
        outgoing = scatter_rows(
            values, scales, ids, weights, order, counts, total=total, capacity=capacity, nowhere=self.nowhere
        )
        under_way = self._group.all_to_all(outgoing, send, receive)
        extra = beside()
        yield
        values, scales, ids, weights = split_rows(under_way.wait(), self._there.value_bytes, self._there.scales, top_k)
        computed = experts(self._there.joined(values, scales), weights, ids)
        returning = self._group.all_to_all(self._back.encode(computed), receive, send)
        yield
        home, quantized = returning.wait(), self._back.scales > 0
        if not quantized:
            home = home.view(computed.dtype)
        return gather_rows(home, order, counts, extra, self._dtype, quantized=quantized, capacity=capacity)
