"""What ranks of a TP group tell each other around a block: the one place that knows whether the residual is split.

Without sequence parallelism every rank keeps the whole residual and a block's summands are all-reduced. With it each
rank keeps 1/tp of the tokens: a block gathers its input and reduce-scatters its output, and the norms in between work
on 1/tp of the rows. Rows may then be sent in e4m3, a scale each: they are quantised before they leave their rank, and
sums are made in fp32 of what arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from katydid_engine.collectives import Collectives, Pending
from katydid_engine.layers.activations import Activations, Fp8Input
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.layers.row_bytes import RowFormat
from katydid_engine.layers.steps import Steps

__all__ = ["BlockOutput", "Entered", "Exchange", "Summand", "joined_columns"]

_PARTS = 2


@dataclass(frozen=True, slots=True)
class Summand:
    """A rank's part of a block's output, ``[T, hidden]``, that is summed in one with the norm behind it."""

    rows: Tensor


BlockOutput = Tensor | Summand


@dataclass(frozen=True, slots=True)
class Entered:
    """Normed rows in front of a block.

    Attributes:
        rows: of all tokens, in the form that the block wants, or plain.
        own: plain, of the tokens that this rank keeps; None where nobody asked for them.
        told: what each rank told of its own, of all tokens; None where there is nothing to tell.
    """

    rows: Activations
    own: Tensor | None
    told: Tensor | None = None


class Exchange:
    """Moves activations ``[T, n]`` between blocks and the residual stream.

    Args:
        fp8: rows of the residual stream are quantised for the way.
    """

    def __init__(self, collectives: Collectives, *, sequence_parallel: bool, fp8: bool = False) -> None:
        self.collectives = collectives
        self.sequence_parallel = sequence_parallel
        self._fp8 = fp8

    def splits(self, num_tokens: int) -> bool:  # noqa: ARG002 - a way of its own may ask
        """Whether the residual of so many tokens is split."""
        return self.sequence_parallel

    def enter(self, x: Tensor, num_tokens: int) -> Tensor:
        """The residual stream's rows -> all ``num_tokens`` rows, on every rank; never quantised."""
        if not self.sequence_parallel:
            return x
        return self.collectives.all_gather(x, 0)[:num_tokens]

    def enter_for(self, consumer: Fp8Input | None, x: Activations, num_tokens: int) -> Activations:
        """As ``enter``, of normed rows for a consumer, in the form that it wants."""
        if not self.sequence_parallel:
            return x
        if not self._fp8:
            assert isinstance(x, Tensor)
            return self.enter(x, num_tokens)
        rows = x if isinstance(x, Tensor) else x.values
        way = RowFormat(rows.shape[1], rows.dtype, consumer=consumer, fp8=True)
        return way.decode(self.collectives.all_gather(way.encode(x), 0)[:num_tokens])

    @property
    def quantises_first(self) -> bool:
        """Whether rows may be quantised for their consumer before ``enter_for``."""
        return self._fp8 or not self.sequence_parallel

    @property
    def parts(self) -> int:
        """How many parts a summand should come in: while one is sent the next is made."""
        return _PARTS if self.sequence_parallel else 1

    def leave(self, x: Tensor) -> Tensor:
        """Summands of all rows, one per rank -> their sum, on the rows this rank keeps."""
        return self.leave_in_parts([x])

    def leave_in_parts(self, parts: Iterable[Tensor]) -> Tensor:
        """As ``leave``, of parts of the columns; each is under way before the next is asked for."""
        if not self.sequence_parallel:
            return joined_columns([self.collectives.all_reduce(part) for part in parts])
        under_way = [self._send(part) for part in parts]
        return joined_columns([self._sum(way, rows.wait(), dtype) for way, rows, dtype in under_way])

    def begin(self, embedded: Tensor) -> tuple[BlockOutput, Tensor | None]:
        """Each rank's part of the embeddings of all tokens -> what the first layer begins with: an output of no block,
        and the residual behind it, or None."""
        return self.leave(embedded), None

    def leave_open(self, parts: Iterable[Tensor]) -> BlockOutput:
        """As ``leave_in_parts`` for a block whose output goes to ``through`` next, which may then make the sum."""
        return self.leave_in_parts(parts)

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
        """From one block to the next: ``norm(x + residual)``, and that sum.

        Args:
            consumer: how the next block wants its rows.
            keep: its plain rows are wanted, too.
        """
        early = consumer if self.quantises_first and not keep else None
        normed, total = self.add_for(norm, early, x, residual)
        entered = self.enter_for(consumer, normed, num_tokens)
        return Entered(entered, normed if isinstance(normed, Tensor) else None), total

    def pass_on(
        self,
        norm: RmsNorm,
        consumer: Fp8Input | None,
        x: BlockOutput,
        residual: Tensor,
        num_tokens: int,
        told_of: Callable[[Tensor], Tensor | None] | None = None,
    ) -> Steps[tuple[Entered, Tensor]]:
        """As ``through``, pausing wherever rows are under way.

        Args:
            told_of: of its own plain rows ``[rows, hidden]``, what a rank tells all: int32 ``[rows, n]``.
        """
        entered, total = self.through(norm, consumer, x, residual, num_tokens, keep=told_of is not None)
        if told_of is not None:
            assert entered.own is not None
            told = told_of(entered.own)
            entered = replace(entered, told=None if told is None else self.enter(told, num_tokens))
        return entered, total
        yield  # a generator that does not pause

    def make_way(self) -> None:
        """Called in front of a kernel that holds every multiprocessor to its end: what is sent beside it, and needs
        some on the way, goes first."""

    def add_for(
        self, norm: RmsNorm, consumer: Fp8Input | None, x: BlockOutput, residual: Tensor
    ) -> tuple[Activations, Tensor]:
        """``norm(x + residual)`` in the form that its consumer wants, and that sum; of rows that this rank keeps."""
        assert isinstance(x, Tensor)
        return norm.add_for(consumer, x, residual)

    def last(self, norm: RmsNorm, x: BlockOutput, residual: Tensor, num_tokens: int) -> Tensor:
        """Behind the last block: ``norm(x + residual)`` of all tokens, on every rank; never quantised."""
        normed, _ = self.add_for(norm, None, x, residual)
        assert isinstance(normed, Tensor)
        return self.enter(normed, num_tokens)

    def _send(self, x: Tensor) -> tuple[RowFormat, Pending, torch.dtype]:
        """Every rank's rows of a summand to it."""
        way = RowFormat(x.shape[1], torch.float32 if self._fp8 else x.dtype, fp8=self._fp8)
        padded = F.pad(x, (0, 0, 0, -x.shape[0] % self.collectives.size))
        return way, self.collectives.all_to_all(way.encode(padded)), x.dtype

    def _sum(self, way: RowFormat, arrived: Tensor, dtype: torch.dtype) -> Tensor:
        rows = way.decode(arrived)
        assert isinstance(rows, Tensor)
        return rows.view(self.collectives.size, -1, rows.shape[1]).float().sum(0).to(dtype)

    def num_kept(self, num_tokens: int) -> int:
        """How many of the rows this rank keeps are tokens; the others fill up."""
        if not self.sequence_parallel:
            return num_tokens
        each = -(-num_tokens // self.collectives.size)
        return min(max(num_tokens - self.collectives.rank * each, 0), each)


def joined_columns(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
