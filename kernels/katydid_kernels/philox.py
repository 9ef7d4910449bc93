"""Philox4x32-10: a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A row's noise is a function of (seed, position, token id) and of nothing else: not of the batch it stands in, of what
was drawn before, or of the device. So a request repeats itself after preemption, resume, hand-off and speculation.

    key = seed (low word, high word)      counter = (token id // 4, position low, position high, 0)
    word = token id % 4
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gumbel_noise", "philox4x32"]

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words per counter.

    Args:
        counter: four int64 tensors of words (0 .. 2**32 - 1), broadcastable with each other and the key.
        key: two int64 tensors of words.

    Returns:
        Four int64 tensors of words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps in int64 but keeps its low 64 bits, which is all that is read.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int, *, first: int = 0) -> Tensor:
    """Standard Gumbel noise, fp32 ``[R, vocab_size]``; ``argmax(logits + noise)`` samples ``softmax(logits)`` exactly.

    A word w becomes u = (w + 1/2) / 2**32 in fp32 and the noise -log(-log1p(-u)). Small u, the large noise that wins,
    keeps its full precision this way; log(u) would round the likeliest tail to a handful of values. The logarithms are
    taken in fp64 and rounded once, so that every device comes to the same fp32.

    Args:
        seeds: int64 ``[R]``, the 64 bits of an unsigned seed.
        positions: int ``[R]``, index in its sequence of the token to be sampled.
        first: token id that the noise begins with.
    """
    seeds = seeds.long().unsqueeze(1)
    positions = positions.long().unsqueeze(1)
    lanes = torch.arange(first // 4, -(-(first + vocab_size) // 4), device=seeds.device).unsqueeze(0)
    zero = torch.zeros_like(positions)
    words = philox4x32(
        (lanes, positions & _WORD, (positions >> 32) & _WORD, zero),
        (seeds & _WORD, (seeds >> 32) & _WORD),
    )
    word = torch.stack(words, dim=-1).flatten(1)[:, first % 4 : first % 4 + vocab_size]
    uniform = ((word.double() + 0.5) * 2.0**-32).float().clamp_(max=1.0 - 2.0**-24)
    return uniform.double().neg_().log1p_().neg_().log_().neg_().float()
