"""The calibration rows of every routed expert, found once for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["RoutedRows"]

_PIECE = 16384  # rows that are multiplied at a time


class RoutedRows:
    """Rows of two models in front of a layer's experts.

    Args:
        original, quantised: ``[T, hidden]`` in batches; those of the quantised model as they are multiplied.
        routes: weights and expert ids ``[T, top_k]`` of the quantised model, by batch.

    Attributes:
        counts: rows of each expert.
    """

    def __init__(
        self,
        original: Sequence[Tensor],
        quantised: Sequence[Tensor],
        routes: Sequence[tuple[Tensor, Tensor]],
        experts: int,
    ) -> None:
        self._original = torch.cat(list(original))
        self._quantised = torch.cat(list(quantised))
        weights, ids = (torch.cat(parts) for parts in zip(*routes, strict=True))
        order = ids.flatten().argsort(stable=True)
        self.counts: list[int] = ids.flatten().bincount(minlength=experts).tolist()
        self._tokens = torch.split(order // ids.shape[1], self.counts)
        self._weights = torch.split(weights.flatten()[order], self.counts)

    def of(self, expert: int, starved: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows of both models that an expert is rounded by, and their weights ``[n, 1]``, some at a time: those routed
        to it, or, where these are fewer than ``starved``, all with weight 1."""
        if self.counts[expert] < starved:
            for original, quantised in zip(
                torch.split(self._original, _PIECE), torch.split(self._quantised, _PIECE), strict=True
            ):
                yield original, quantised, quantised.new_ones(len(quantised), 1)
            return
        for tokens, weights in zip(
            torch.split(self._tokens[expert], _PIECE), torch.split(self._weights[expert], _PIECE), strict=True
        ):
            yield self._original[tokens], self._quantised[tokens], weights[:, None]
