"""The option ``sparse_prefill``: long prompts of requests that allow it attend to a part of their blocks.

    stem:budget=0.25,dense_layers=2,min_tokens=32768

What it says is part of the model's identity: pages made so are never taken for others. Requests that do not allow it
are computed densely, and their pages have the identity of a model without the option.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

__all__ = ["SparsePrefill", "before_tail", "whole_blocks"]

_METHOD = "stem"
# Of the selection, as in ``katydid_kernels.stem_select``.
_BLOCK_TOKENS = 128
_RULES = ("share", "paper", "released")
_KINDS: dict[str, Callable[[str], object]] = {
    "budget": float,
    "rule": str,
    "decay": float,
    "dense_layers": int,
    "min_tokens": int,
    "tail_blocks": int,
}
_ALLOWED = {
    "budget": "above 0, at most 1",
    "rule": ", ".join(_RULES),
    "decay": "above 0, at most 1",
    "dense_layers": "a number of layers",
    "min_tokens": "a number of tokens above 0",
    "tail_blocks": "a number of blocks of 128 tokens",
}


@dataclass(frozen=True, slots=True)
class SparsePrefill:
    """How long prompts are computed.

    Attributes:
        budget: share of a prompt's pairs of blocks that is kept, with rule "share".
        rule: how budgets come about, as in ``katydid_kernels.StemRule``.
        decay: what the last block of a prompt keeps of the first one's budget.
        dense_layers: the first layers, which keep everything.
        min_tokens: prompts below are dense.
        tail_blocks: blocks of 128 tokens at a prompt's end, where its question stands, that attend to everything; they
            take from the same budget. Without them a single fact is not found again.
    """

    budget: float = 0.25
    rule: Literal["share", "paper", "released"] = "share"
    decay: float = 0.7
    dense_layers: int = 2
    min_tokens: int = 32_768
    tail_blocks: int = 4

    @classmethod
    def parse(cls, text: str) -> SparsePrefill:
        """Raises ValueError naming the part that is wrong and what is allowed."""
        method, _, rest = text.partition(":")
        if method != _METHOD:
            raise ValueError(f"sparse prefill by {method!r}: allowed is {_METHOD}:key=value,...")
        values: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            if key not in _KINDS or key in values:
                raise ValueError(f"{part!r}: allowed are {', '.join(_KINDS)}, each once, as key=value")
            try:
                values[key] = _KINDS[key](value)
            except ValueError:
                raise ValueError(f"{key} is {value!r}: allowed is {_ALLOWED[key]}") from None
        return replace(cls(), **values)

    def __post_init__(self) -> None:
        sound = {
            "budget": 0 < self.budget <= 1,
            "rule": self.rule in _RULES,
            "decay": 0 < self.decay <= 1,
            "dense_layers": self.dense_layers >= 0,
            "min_tokens": self.min_tokens >= 1,
            "tail_blocks": self.tail_blocks >= 0,
        }
        for key, fits in sound.items():
            if not fits:
                raise ValueError(f"{key} is {getattr(self, key)}: allowed is {_ALLOWED[key]}")

    def attended(self, start: int, prompt: int) -> int:
        """About how many tokens the one at ``start`` attends to, in layers that are sparse, of a prompt of so many."""
        return start if start >= self.tail(prompt) else min(start, round(self._most(prompt)))

    def pairs(self, start: int, count: int, prompt: int) -> float:
        """Likewise of ``count`` tokens from ``start`` on, in all."""
        most, tail = self._most(prompt), self.tail(prompt)

        def before(end: float) -> float:
            return end * end / 2 if end <= most else most * most / 2 + most * (end - most)

        first, last, whole = min(start, tail), min(start + count, tail), max(start, tail)
        behind = start + count - whole if start + count > tail else 0
        return before(last) - before(first) + behind * (whole + behind / 2)

    def tail(self, prompt: int) -> int:
        """Where the tokens begin that attend to everything."""
        return max(0, -(-prompt // _BLOCK_TOKENS) - self.tail_blocks) * _BLOCK_TOKENS

    def _most(self, prompt: int) -> float:
        """Tokens that others than the last attend to at most: what a share of all pairs comes to if that is as many for
        all, without what the last take; the other rules keep a tenth of long prompts."""
        if self.rule != "share":
            return prompt / 10
        # Without such blocks the last one counts whole, which may be more than there is.
        tail = 2 * max(0, prompt - self.tail(prompt)) / prompt
        return prompt * (1 - math.sqrt(1 - max(0.0, self.budget - tail)))

    def __str__(self) -> str:
        parts = (f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return f"{_METHOD}:{','.join(parts)}"


def whole_blocks(start: int, chunk: int) -> int:
    """The chunk of a prompt from token ``start`` on, cut to end between two blocks if that leaves any of it: chunks
    that begin there select what the whole prompt would."""
    rest = (start + chunk) % _BLOCK_TOKENS
    return chunk - rest if chunk > rest else chunk


def before_tail(start: int, chunk: int, prompt: int, options: SparsePrefill) -> int:
    """The chunk of a prompt of so many tokens from token ``start`` on, cut to end before the blocks that attend to
    everything if that leaves any of it: these take as long as several times as many others."""
    tail = options.tail(prompt)
    return min(chunk, tail - start) if tail > start else chunk
