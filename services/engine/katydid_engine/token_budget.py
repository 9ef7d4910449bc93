"""How many prompt tokens a step may compute beside decodes, so that these keep their pace while a long prompt comes.

A step takes about what its decodes alone take, and so much more for every prompt token. Both are measured, and follow
the prompt: its later chunks attend to more. With a target for the time between a row's tokens, the prompt gets what is
left of it; a row that drafts yields several tokens a step, so its steps may take longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from katydid_runtime.block_hash import BLOCK_TOKENS

__all__ = ["TokenBudget", "deal_chunks", "deal_turn"]

_SMOOTHING = 0.3
# Single outliers, such as a first use or a page fault, say little of the steps to come.
_MOST_JUMP = 4.0


class TokenBudget:
    """``target_s`` is the time a row may wait for a token; None for no limit. ``least`` prompt tokens go into a step in
    any case, so that a prompt comes to its end on a machine that is too slow for the target. With ``sizes`` it is one
    of these, for which steps are prepared, or at least twice the largest."""

    def __init__(self, target_s: float | None, least: int, sizes: Sequence[int] = ()) -> None:
        self._target_s = target_s
        self._least = least
        self._sizes = sorted(sizes)
        self._decodes_s: float | None = None
        self._token_s: float | None = None

    @property
    def prepared(self) -> bool:
        """Whether steps are prepared for chunks of one prompt."""
        return bool(self._sizes)

    def prompt_tokens(self, decodes: int, tokens_per_row: float = 1.0) -> int | None:
        """Prompt tokens beside so many decodes, each of which yields ``tokens_per_row``; None for any number."""
        if self._target_s is None or not decodes:
            return None
        tokens = self._least
        if self._token_s is not None:
            left = self._target_s * tokens_per_row - (self._decodes_s or 0.0)
            tokens = max(tokens, int(left / self._token_s))
        if not self._sizes or tokens >= 2 * self._sizes[-1]:
            return tokens
        return max((size for size in self._sizes if size <= tokens), default=self._sizes[0])

    def took(self, prompt_tokens: int, decodes: int, seconds: float) -> None:
        """A step has taken so long."""
        if not prompt_tokens:
            self._decodes_s = _average(self._decodes_s, seconds)
            return
        alone = min(self._decodes_s or 0.0, 0.9 * seconds) if decodes else 0.0
        self._token_s = _average(self._token_s, (seconds - alone) / prompt_tokens)


def deal_turn(wanted: Sequence[int], budget: int, turn: int) -> list[int]:
    """The whole budget for one prompt, as prepared steps have it: every other turn for the first, those in between for
    the others in order."""
    chunks = [0] * len(wanted)
    if wanted:
        index = 1 + turn // 2 % (len(wanted) - 1) if turn % 2 and len(wanted) > 1 else 0
        chunks[index] = min(wanted[index], budget)
    return chunks


def deal_chunks(wanted: Sequence[int], budget: int) -> list[int]:
    """Tokens for each prompt that wants so many: half of what is left for each in order, then the rest in order, so
    that a long one leaves room to a short newcomer."""
    least = max(1, min(BLOCK_TOKENS, budget // 2))
    chunks = []
    for tokens in wanted:
        chunks.append(min(tokens, max(budget // 2, least), budget))
        budget -= chunks[-1]
    for index, tokens in enumerate(wanted):
        more = min(tokens - chunks[index], budget)
        chunks[index] += more
        budget -= more
    return chunks


def _average(old: float | None, new: float) -> float:
    if old is None:
        return new
    return old + _SMOOTHING * (min(new, _MOST_JUMP * old) - old)
