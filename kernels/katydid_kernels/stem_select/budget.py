"""How many blocks of keys query block i of a prompt keeps: the paper's linear decay, the released rule, and a share.

A row with i + 1 visible blocks keeps ``min(i + 1, k(i))`` of them, always the first ``sink``, the ``window`` before its
own and its own among them; the last ``tail`` rows of a prompt, where the question stands as a rule, keep everything. So
the number is known before any score is, and is the same for every head: the work of a prompt can be dealt out ahead.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["BLOCK", "StemRule", "kept_blocks"]

BLOCK = 128


@dataclass(frozen=True, slots=True)
class StemRule:
    """What is kept, and by what score.

    Attributes:
        budget: with rule "share": the share of a prompt's (query block, visible key block) pairs that is kept.
        rule: "share"; "paper": ``k(i) = ceil(a - a (1 - decay) i / N)`` with a = 0.2 N blocks up to 16K tokens and
            0.1 N above, at least 54; "released": what the published code does, a = all below 56 blocks, 0.2 N + 30
            below 160, 0.1 N + 30 from there, linear from a to ``decay * a`` over the rows behind the a-th.
        decay: what the last row keeps of the first one's budget; 0.7 in the paper.
        sink, window: blocks always kept at the beginning and before the query's own.
        tail: blocks of queries at the end of the prompt that keep everything; with rule "share" out of the budget.
        value_weight: beta of the score.
        stride: s of the score; a divisor of 128.
    """

    budget: float = 0.25
    rule: Literal["share", "paper", "released"] = "share"
    decay: float = 0.7
    sink: int = 4
    window: int = 4
    tail: int = 0
    value_weight: float = 0.2
    stride: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget must be above 0 and at most 1, got {self.budget}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, got {self.decay}")
        if self.sink < 0 or self.window < 0:
            raise ValueError(f"sink and window must not be negative, got {self.sink} and {self.window}")
        if self.tail < 0:
            raise ValueError(f"tail must not be negative, got {self.tail}")
        if self.stride < 1 or BLOCK % self.stride:
            raise ValueError(f"stride must divide {BLOCK}, got {self.stride}")


@functools.lru_cache(maxsize=256)
def kept_blocks(rule: StemRule, prompt_tokens: int) -> tuple[int, ...]:
    """How many blocks each query block of a prompt keeps, its own included."""
    count = -(-prompt_tokens // BLOCK)
    if rule.rule == "paper":
        wanted = _decaying(max(54.0, (0.2 if prompt_tokens <= 16384 else 0.1) * count), count, rule.decay)
    elif rule.rule == "released":
        wanted = _released(count, rule.decay)
    else:
        wanted = _of_share(rule, count)
    return _bounded(rule, wanted)


def _bounded(rule: StemRule, wanted: list[int]) -> tuple[int, ...]:
    least = rule.sink + rule.window + 1
    end = len(wanted) - rule.tail
    return tuple(i + 1 if i >= end else min(i + 1, max(k, least)) for i, k in enumerate(wanted))


def _decaying(start: float, count: int, decay: float) -> list[int]:
    return [math.ceil(start - start * (1 - decay) / count * i) for i in range(count)]


def _released(count: int, decay: float) -> list[int]:
    if count < 56:
        return [count] * count
    first = int((0.2 if count < 160 else 0.1) * count) + 30
    later = [
        math.floor(first + (i - first) / max(1, count - first - 1) * (first * decay - first)) for i in range(count)
    ]
    return [first if i < first else min(max(k, 1), first) for i, k in enumerate(later)]


def _of_share(rule: StemRule, count: int) -> list[int]:
    """The paper's decay from the largest start whose rows keep no more than the share of all visible pairs."""
    pairs = rule.budget * count * (count + 1) / 2
    low, high = 0.0, count / rule.decay + 1
    for _ in range(40):
        middle = (low + high) / 2
        kept = sum(_bounded(rule, _decaying(middle, count, rule.decay)))
        low, high = (middle, high) if kept <= pairs else (low, middle)
    return _decaying(low, count, rule.decay)
