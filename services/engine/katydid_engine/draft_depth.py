"""How many tokens to draft behind every sampled one: told, or chosen by what drafts and steps were measured to bring.

A row that is given d drafts yields 1 + p1 + p1 p2 + ... + p1 .. pd tokens, where pj is how often draft j is accepted
when those before it are. A step costs what steps of as many rows and drafts took of late. The depth with the most
tokens a second is chosen, per power of two of rows; each is tried a few times first, and the others again now and then,
because models, texts and machines change. Which depth is chosen never changes a token. Ranks that pass together draft
as many: there each chooses for itself, and follows what they agree on.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["MAX_DRAFTS", "DraftDepth"]

MAX_DRAFTS = 3
_TRIALS = 3
_TRY_AGAIN_AFTER = 300
_SMOOTHING = 0.2
_MEMORY = 0.99
_HOPE = 0.7


class DraftDepth:
    """``most`` drafts at most. ``automatic``: chosen; else always ``most``.

    Attributes:
        wish: what this rank alone would have chosen last.
    """

    def __init__(self, most: int, *, automatic: bool = False) -> None:
        self.most = most
        self._automatic = automatic
        self._tried = [0.0] * most
        self._accepted = [0.0] * most
        self._seconds: dict[tuple[int, int], float] = {}
        self._samples: dict[tuple[int, int], int] = {}
        self._due: dict[int, int] = {}
        self._next_trial: dict[int, int] = {}
        self._agreed: Callable[[], int | None] = lambda: None
        self.wish = most

    @property
    def depths(self) -> tuple[int, ...]:
        """What ``choose`` may say."""
        return tuple(range(self.most + 1)) if self._automatic else (self.most,)

    def follow(self, agreed: Callable[[], int | None]) -> None:
        """From now on ``choose`` says what ``agreed`` does, where that is a number."""
        self._agreed = agreed

    def choose(self, rows: int) -> int:
        """Drafts to make in a step that samples so many rows."""
        self.wish = self._own_choice(rows)
        agreed = self._agreed()
        return self.wish if agreed is None else agreed

    def _own_choice(self, rows: int) -> int:
        if not self._automatic or not self.most:
            return self.most
        size = rows.bit_length()
        for depth in range(self.most + 1):
            if self._samples.get((size, depth), 0) < _TRIALS:
                return depth
        self._due[size] = self._due.get(size, 0) + 1
        if self._due[size] >= _TRY_AGAIN_AFTER:
            self._due[size] = 0
            trial = self._next_trial[size] = (self._next_trial.get(size, -1) + 1) % (self.most + 1)
            self._samples[size, trial] = 0
        return max(range(self.most + 1), key=lambda depth: self.tokens(depth) / self._seconds[size, depth])

    def tokens(self, depth: int) -> float:
        """Tokens that a row yields with so many drafts, as far as is known."""
        total = share = 1.0
        for tried, accepted in zip(self._tried[:depth], self._accepted[:depth], strict=True):
            share *= accepted / tried if tried else _HOPE
            total += share
        return total

    def verified(self, drafted: int, accepted: int) -> None:
        """A row was given ``drafted`` drafts, of which the first ``accepted`` were its own tokens."""
        for place in range(min(drafted, accepted + 1)):
            self._tried[place] = self._tried[place] * _MEMORY + 1
            self._accepted[place] = self._accepted[place] * _MEMORY + (accepted > place)

    def took(self, rows: int, depth: int, seconds: float) -> None:
        """A step of decodes alone, each given ``depth`` drafts and drafting as many, has taken so long."""
        key = rows.bit_length(), depth
        self._samples[key] = self._samples.get(key, 0) + 1
        old = self._seconds.get(key, seconds)
        self._seconds[key] = old + _SMOOTHING * (seconds - old)
