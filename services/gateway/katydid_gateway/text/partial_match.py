"""How much of a text's end might still become one of several words: what a streaming search must hold back."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["held_suffix"]


def held_suffix(text: str, words: Iterable[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `words`; 0 when none is."""
    longest = 0
    for word in words:
        for length in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:length]):
                longest = length
                break
    return longest
