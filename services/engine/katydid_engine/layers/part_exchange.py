"""The split residual's exchange for a part of a chunk, whose rows travel while another part is computed.

Two parts take turns (`steps.interleave`). Between two blocks a part sends its summands; sums, norms and routes the rows
that its rank owns; and sends these to all. It pauses, and the other part computes a block meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from katydid_engine.layers.activations import Activations, Fp8Input, QuantizedRows
from katydid_engine.layers.exchange import BlockOutput, Entered, Exchange, Summand, joined_columns
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.layers.peer_exchange import plain_rows, scaled_by_token
from katydid_engine.layers.row_bytes import RowFormat
from katydid_engine.layers.steps import Steps

__all__ = ["CopiedPartExchange", "PartExchange", "RowCopies"]


class PartExchange(Exchange):
    """By collectives, of whichever kind. ``whole`` makes the last sum and norm, for which nothing is left to do
    meanwhile."""

    def __init__(self, whole: Exchange, *, fp8: bool) -> None:
        super().__init__(whole.collectives, sequence_parallel=True, fp8=fp8)
        self._whole = whole

    def begin(self, embedded: Tensor) -> tuple[BlockOutput, Tensor | None]:
        share = -(-len(embedded) // self.collectives.size)
        return Summand(embedded), embedded.new_zeros((share, embedded.shape[1]))

    def leave_open(self, parts: Iterable[Tensor]) -> BlockOutput:
        return Summand(joined_columns(list(parts)))

    def pass_on(
        self,
        norm: RmsNorm,
        consumer: Fp8Input | None,
        x: BlockOutput,
        residual: Tensor,
        num_tokens: int,
        told_of: Callable[[Tensor], Tensor | None] | None = None,
    ) -> Steps[tuple[Entered, Tensor]]:
        assert isinstance(x, Summand)
        way, sent, dtype = self._send(x.rows)
        yield
        own, total = norm.add(self._sum(way, sent.wait(), dtype), residual)
        told = None if told_of is None else told_of(own)
        there = RowFormat(own.shape[1], dtype, consumer=consumer, fp8=self._fp8)
        message = there.encode(own)
        if told is not None:
            message = torch.cat((message, told.view(torch.uint8)), dim=1)
        gathering = self.collectives.gather(message)
        yield
        arrived = gathering.wait()[:num_tokens]
        if told is not None:
            told = arrived[:, there.bytes :].contiguous().view(torch.int32)
        return Entered(there.decode(arrived[:, : there.bytes]), own, told), total

    def last(self, norm: RmsNorm, x: BlockOutput, residual: Tensor, num_tokens: int) -> Tensor:
        assert isinstance(x, Summand)
        return self._whole.last(norm, self._whole.leave_open([x.rows]), residual, num_tokens)


class RowCopies(Protocol):
    """`PartCopies`, as far as it is used here."""

    def beside(self, part: int) -> AbstractContextManager[object]: ...

    def quantize(self, part: int, x: Tensor) -> None: ...

    def scatter(self, part: int, x: Tensor) -> None: ...

    def sum(self, part: int, x: Tensor, residual: Tensor, weight: Tensor, eps: float, own: Tensor) -> Tensor: ...

    def gather(self, part: int, tokens: int, told: Tensor | None = None) -> None: ...

    def gathered(self, part: int, tokens: int, told: int = 0) -> tuple[Tensor, Tensor, Tensor]: ...

    def make_way(self, part: int) -> None: ...

    def join(self) -> None: ...


class CopiedPartExchange(PartExchange):
    """By copy engines between GPUs of one host, in e4m3 with a scale a row; ``part`` is its number."""

    def __init__(self, whole: Exchange, copies: RowCopies, part: int) -> None:
        super().__init__(whole, fp8=True)
        self._copies, self._part = copies, part

    def pass_on(
        self,
        norm: RmsNorm,
        consumer: Fp8Input | None,
        x: BlockOutput,
        residual: Tensor,
        num_tokens: int,
        told_of: Callable[[Tensor], Tensor | None] | None = None,
    ) -> Steps[tuple[Entered, Tensor]]:
        assert isinstance(x, Summand)
        copies, part, summand = self._copies, self._part, x.rows.contiguous()
        copies.quantize(part, summand)
        with copies.beside(part):
            copies.scatter(part, summand)
            own = torch.empty_like(residual)
            total = copies.sum(part, summand, residual, norm.weight, norm.eps, own)
            told = None if told_of is None else told_of(own)
            copies.gather(part, num_tokens, told)
        yield
        # Summands are kept until here: what is gathered has been summed.
        values, scale, arrived = copies.gathered(part, num_tokens, 0 if told is None else told.shape[1])
        rows: Activations = QuantizedRows(values, scale)
        if consumer is None or not scaled_by_token(consumer):
            rows = plain_rows(values, scale, residual.dtype)
        return Entered(rows, own, None if told is None else arrived), total

    def make_way(self) -> None:
        self._copies.make_way(self._part)

    def last(self, norm: RmsNorm, x: BlockOutput, residual: Tensor, num_tokens: int) -> Tensor:
        self._copies.join()
        return super().last(norm, x, residual, num_tokens)
