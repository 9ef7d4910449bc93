"""Where one sequence stands in its grammar: which tokens may come next, and back from tokens that were only drafts.

Before ``begin_after`` was output everything but a stop token may come. Stop tokens may come only where the grammar may
end; when it is complete and nothing else can follow, it is ``ended``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["GrammarState", "Matcher"]


class Matcher(Protocol):
    """What is used of ``xgrammar.GrammarMatcher``."""

    def accept_token(self, token_id: int) -> bool: ...
    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> bool: ...
    def rollback(self, num_tokens: int = 1) -> None: ...
    def is_completed(self) -> bool: ...
    def is_terminated(self) -> bool: ...


class GrammarState:
    """``matcher`` is new and knows ``stop_tokens``; a mask has ``words`` 32-bit words."""

    def __init__(
        self, matcher: Matcher, begin_after: tuple[int, ...], stop_tokens: Iterable[int], vocab_size: int
    ) -> None:
        self._matcher = matcher
        self._marker = begin_after
        self._matched = 0  # tokens the matcher has accepted
        # While the marker is awaited: how much of it the output ends with, after each token so far.
        self._seen = [0]
        self._free = torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32)
        for token in stop_tokens:
            self._free.view(-1)[token // 32] &= ~_bit(token)
        self._stops = ~self._free
        if rest := vocab_size % 32:
            # The library leaves the bits behind the vocabulary as they come.
            self._free[0, -1] &= (1 << rest) - 1
            self._stops[0, -1] &= (1 << rest) - 1

    @property
    def begun(self) -> bool:
        return self._seen[-1] == len(self._marker)

    @property
    def ended(self) -> bool:
        """Whether a stop token was accepted, or nothing but one can come."""
        if not self.begun:
            return False
        if self._matcher.is_terminated():
            return True
        return self._matcher.is_completed() and self.only_stops(self.mask())

    def only_stops(self, mask: Tensor) -> bool:
        """Whether ``mask`` (int32 ``[1, words]``) allows nothing but stop tokens."""
        return not bool((mask & ~self._stops).any())

    def mask(self) -> Tensor:
        """Tokens that may come next: int32 ``[1, words]``, bit ``i % 32`` of word ``i // 32`` for token i."""
        if not self.begun:
            return self._free
        mask = torch.zeros_like(self._free)
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(mask)
        return mask & (self._free | self._stops)

    def allows(self, mask: Tensor, token: int) -> bool:
        """Whether ``mask`` (int32 ``[1, words]``) has the token's bit."""
        return bool(mask.view(-1)[token // 32] & _bit(token))

    def accept(self, token: int) -> bool:
        """Goes on by one token; False where it may not come, and then nothing changes."""
        if self.begun:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return False
            self._matched += 1
            return True
        if self.allows(self._stops, token):
            return False
        self._seen.append(self._after(self._seen[-1], token))
        return True

    def rollback(self, count: int) -> None:
        """Takes back the last ``count`` tokens accepted."""
        of_matcher = min(count, self._matched)
        if of_matcher:
            self._matcher.rollback(of_matcher)
            self._matched -= of_matcher
        if count > of_matcher:
            del self._seen[of_matcher - count :]

    def _after(self, seen: int, token: int) -> int:
        """How much of the marker the output ends with once ``token`` follows ``seen`` tokens of it."""
        tail = (*self._marker[:seen], token)
        return next(size for size in range(len(tail), -1, -1) if self._marker[:size] == tail[len(tail) - size :])


def _bit(token: int) -> int:
    """The token's bit of its word, as a signed 32-bit integer."""
    bit = 1 << token % 32
    return bit - (1 << 32) if bit >> 31 else bit
