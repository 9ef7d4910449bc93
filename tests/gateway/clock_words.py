"""Words that tell when an engine made them, each of one token: they show how long every chunk of a stream took.

The clock is the host's monotonic one, in ticks of 0.1 ms, modulo the number of words: some two seconds.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import Tokenizer

__all__ = ["ClockWords"]

_TICK_S = 1e-4
_WORD = re.compile("Ġ([a-z]+)")


class ClockWords:
    """The lower-case words of a byte-level vocabulary in the order of their ids. `folder` is a model's."""

    def __init__(self, folder: str | Path) -> None:
        vocabulary = Tokenizer.from_file(str(Path(folder) / "tokenizer.json")).get_vocab()
        found = sorted((token, match[1]) for text, token in vocabulary.items() if (match := _WORD.fullmatch(text)))
        self._tokens = [token for token, _ in found]
        self._words = [word for _, word in found]
        self._ticks = {word: tick for tick, word in enumerate(self._words)}

    def token(self, now_s: float) -> int:
        """The token that says `now_s`."""
        return self._tokens[int(now_s / _TICK_S) % len(self._tokens)]

    def word(self, now_s: float) -> str:
        """Its text."""
        return f" {self._words[int(now_s / _TICK_S) % len(self._words)]}"

    def age_s(self, word: str, now_s: float) -> float:
        """Seconds since `word` was made."""
        return (now_s / _TICK_S - self._ticks[word.strip()]) % len(self._ticks) * _TICK_S
