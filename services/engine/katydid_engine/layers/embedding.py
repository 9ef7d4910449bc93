"""Token embedding and output head, cut over the TP group by vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from katydid_kernels.embedding import embedding
from katydid_kernels.linear import linear, linear_unrounded
from torch import Tensor

from katydid_engine.collectives import Collectives
from katydid_engine.weights import Weights

__all__ = ["Embedding", "LmHead"]


def _vocabulary_part(vocab_size: int, rank: int, size: int) -> slice:
    """Rows of a rank; the last rank's part is short when the vocabulary does not divide."""
    step = -(-vocab_size // size)
    return slice(min(rank * step, vocab_size), min((rank + 1) * step, vocab_size))


class Embedding:
    """Looks up this rank's rows and yields zeros for the others': the sum over ranks is the embedding."""

    def __init__(self, weights: Weights, vocab_size: int, hidden_size: int) -> None:
        self._part = _vocabulary_part(vocab_size, weights.rank, weights.size)
        self.weight = weights.slice("weight", (vocab_size, hidden_size), (self._part, slice(0, hidden_size)))

    def __call__(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """int32 ``[T]`` -> ``[T, hidden]``, this rank's summand; with positions, tokens at the first have zeros."""
        return embedding(token_ids, self.weight, first=self._part.start, positions=positions)


class LmHead:
    """Logits in fp32: of this rank's part of the vocabulary, or of all of it on every rank.

    Attributes:
        first: token id that this rank's part begins with.
        room: tokens of a part; the last ranks' may be shorter.
        vocab_size: of all parts.

    Args:
        tied: the embedding whose rows are the head's; otherwise the head has a weight of its own.
        fp32: multiply fp32 weights and hidden states, not only round the result to fp32. On a GPU weights that are
            16-bit numbers stay so beside 16-bit hidden states: the products are the same.
    """

    def __init__(
        self,
        weights: Weights,
        collectives: Collectives,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: Embedding | None,
        fp32: bool,
    ) -> None:
        part = _vocabulary_part(vocab_size, weights.rank, weights.size)
        dtype = torch.float32 if fp32 else weights.dtype
        if tied is not None:
            self.weight = tied.weight.to(dtype)
        else:
            self.weight = weights.slice("weight", (vocab_size, hidden_size), (part, slice(0, hidden_size)), dtype=dtype)
        self._unrounded = fp32 and _is_narrow(self.weight, weights.dtype)
        if self._unrounded:
            self.weight = self.weight.to(weights.dtype)
        self.vocab_size = vocab_size
        self.first = part.start
        self.room = -(-vocab_size // weights.size)
        self._collectives = collectives

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden] -> [rows, vocab]``."""
        logits = self.part(hidden)
        if self._collectives.size == 1:
            return logits
        padded = F.pad(logits, (0, self.room - logits.shape[1]))
        return self._collectives.all_gather(padded, 1)[:, : self.vocab_size]

    def part(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` -> this rank's part of the logits, ``[rows, at most room]``."""
        if self._unrounded:
            return linear_unrounded(hidden, self.weight)
        return linear(hidden.to(self.weight.dtype), self.weight).float()


def _is_narrow(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether fp32 weights on a GPU are numbers of a 16-bit ``dtype``; in slices, for they are large."""
    if weight.device.type == "cpu" or dtype.itemsize != 2:
        return False
    parts = (weight[start : start + 16384] for start in range(0, len(weight), 16384))
    return all(torch.equal(part.to(dtype).float(), part) for part in parts)
