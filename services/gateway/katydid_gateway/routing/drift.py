"""Whether engines find in their caches what routing said they would: a picture that is wrong is wrong silently.

Hashes that differ, events that do not come and engines that drop blocks all show as one thing: predicted tokens that
were not there. Each engine has a decayed share of predicted tokens that were found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CacheDrift"]

# An observation's weight in the decayed sums.
_FORGET = 0.98
# Below this share of what was predicted, for so many predicted tokens, the picture is called wrong.
_ALARM, _CLEAR = 0.5, 0.8
_ENOUGH_TOKENS = 50_000


@dataclass(slots=True)
class _Sums:
    predicted: float = 0.0
    found: float = 0.0
    wrong: bool = False


@dataclass(slots=True)
class CacheDrift:
    """Decayed sums by engine."""

    _engines: dict[str, _Sums] = field(default_factory=dict)

    def found(self, engine: str, predicted_tokens: int, found_tokens: int) -> bool:
        """A prompt's first token came; returns whether the engine's picture turned wrong with it."""
        sums = self._engines.setdefault(engine, _Sums())
        sums.predicted = _FORGET * sums.predicted + predicted_tokens
        # Blocks that came unexpectedly do not make up for those that were missing.
        sums.found = _FORGET * sums.found + min(predicted_tokens, found_tokens)
        before = sums.wrong
        share = self.share(engine)
        if sums.predicted >= _ENOUGH_TOKENS and share < _ALARM:
            sums.wrong = True
        elif share > _CLEAR:
            sums.wrong = False
        return sums.wrong and not before

    def share(self, engine: str) -> float:
        """Share of predicted tokens that were found, 1 without any prediction."""
        sums = self._engines.get(engine)
        return sums.found / sums.predicted if sums is not None and sums.predicted else 1.0
