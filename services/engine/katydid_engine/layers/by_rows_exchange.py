"""A residual that is split where many rows make its norms and transfers the cost, and whole where few make the wait it.

So one plan serves prompts and answers: every rank knows how many rows a pass has, and takes the same of the two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from katydid_engine.layers.activations import Activations, Fp8Input
from katydid_engine.layers.exchange import BlockOutput, Entered, Exchange
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.layers.steps import Steps

__all__ = ["ByRowsExchange"]


class ByRowsExchange(Exchange):
    """Takes ``few`` for passes of up to ``most`` tokens, ``many`` for others; both of the same group."""

    def __init__(self, few: Exchange, many: Exchange, most: int) -> None:
        super().__init__(many.collectives, sequence_parallel=True)
        self._few, self._many, self._most = few, many, most

    def splits(self, num_tokens: int) -> bool:
        return self._way(num_tokens).splits(num_tokens)

    def enter(self, x: Tensor, num_tokens: int) -> Tensor:
        return self._way(num_tokens).enter(x, num_tokens)

    def enter_for(self, consumer: Fp8Input | None, x: Activations, num_tokens: int) -> Activations:
        return self._way(num_tokens).enter_for(consumer, x, num_tokens)

    @property
    def parts(self) -> int:
        return 1

    def leave_in_parts(self, parts: Iterable[Tensor]) -> Tensor:
        (x,) = parts
        return self._way(len(x)).leave_in_parts([x])

    def begin(self, embedded: Tensor) -> tuple[BlockOutput, Tensor | None]:
        return self._way(len(embedded)).begin(embedded)

    def leave_open(self, parts: Iterable[Tensor]) -> BlockOutput:
        (x,) = parts
        return self._way(len(x)).leave_open([x])

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
        return self._way(num_tokens).through(norm, consumer, x, residual, num_tokens, keep=keep)

    def pass_on(
        self,
        norm: RmsNorm,
        consumer: Fp8Input | None,
        x: BlockOutput,
        residual: Tensor,
        num_tokens: int,
        told_of: Callable[[Tensor], Tensor | None] | None = None,
    ) -> Steps[tuple[Entered, Tensor]]:
        return (yield from self._way(num_tokens).pass_on(norm, consumer, x, residual, num_tokens, told_of))

    def last(self, norm: RmsNorm, x: BlockOutput, residual: Tensor, num_tokens: int) -> Tensor:
        return self._way(num_tokens).last(norm, x, residual, num_tokens)

    def num_kept(self, num_tokens: int) -> int:
        return self._way(num_tokens).num_kept(num_tokens)

    def _way(self, num_tokens: int) -> Exchange:
        return self._few if num_tokens <= self._most else self._many
