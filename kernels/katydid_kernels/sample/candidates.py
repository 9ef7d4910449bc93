"""The tokens that the filters may keep: read from the listed groups, gathered, and ranked.

A candidate is one int64, its logit's order key over the complement of its id: the larger of two comes first, by logit,
then by id.
"""

import triton
import triton.language as tl

from katydid_kernels.sample.row_values import adjusted_logits, key_value, order_key, raw_logits

__all__ = ["BANNED", "CANDIDATES", "collect", "listed_fours", "listed_tile", "logit_of", "nth_candidates", "ranks",
           "token_of"]  # fmt: skip

CANDIDATES = 512
# The order key of -inf.
BANNED = tl.constexpr(-2139095041)
_NONE = tl.constexpr(-2139095041 << 32)


@triton.jit
def listed_fours(list_ptr, first, count, GROUPS: tl.constexpr):
    """The fours of tokens of ``GROUPS`` listed groups, ``[GROUPS, 4]``, and which of them are listed."""
    index = first + tl.arange(0, GROUPS)
    group = tl.load(list_ptr + index, mask=index < count, other=0)
    fours = (group // 256 * 1024 + group % 256)[:, None] + tl.arange(0, 4)[None, :] * 256
    return fours, (index < count)[:, None] & (fours >= 0)


@triton.jit
def listed_tile(row, list_ptr, first, count, vocab, source, terms, GROUPS: tl.constexpr, PENDING: tl.constexpr):
    """Logits and tokens, ``[GROUPS, 4, 4]``, of so many listed groups; -inf behind the last of ``count``."""
    fours, valid = listed_fours(list_ptr, first, count, GROUPS)
    raw = raw_logits(row, fours, valid, vocab, 0, source, terms)
    return adjusted_logits(raw, row, fours, 0, vocab, source, terms, PENDING)


@triton.jit
def collect(x, token, bound, found, candidates_ptr, SIZE: tl.constexpr):
    """Appends what reaches the bound to the candidates, as far as there is room; returns how many there are in all.

    A group's tokens lie in one thread: only its number of candidates goes from thread to thread.
    """
    key = order_key(x)
    reaches = (key >= bound).to(tl.int32)
    in_four = tl.sum(reaches, 2)
    in_group = tl.sum(in_four, 1)
    place = found + tl.cumsum(in_group, 0) - in_group
    place = place[:, None] + tl.cumsum(in_four, 1) - in_four
    place = place[:, :, None] + tl.cumsum(reaches, 2) - reaches
    candidate = (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    tl.store(candidates_ptr + place, candidate, mask=(reaches != 0) & (place < SIZE))
    return found + tl.sum(in_group, 0)


@triton.jit
def nth_candidates(candidates_ptr, n, found):
    """The n-th of ``found``; behind the last one what comes after all and has no mass."""
    return tl.load(candidates_ptr + n, mask=n < found, other=_NONE)


@triton.jit
def logit_of(candidate):
    return key_value((candidate >> 32).to(tl.int32))


@triton.jit
def token_of(candidate):
    return 0x7FFFFFFF - (candidate & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def ranks(candidate, candidates_ptr, found, SIZE: tl.constexpr, STEP: tl.constexpr):
    """How many candidates come before each."""
    rank = tl.zeros((STEP, SIZE), tl.int32)
    for first in range(0, found, STEP):
        other = nth_candidates(candidates_ptr, first + tl.arange(0, STEP), found)
        rank += (other[:, None] > candidate[None, :]).to(tl.int32)
    return tl.sum(rank, 0)
