"""Ids of words seen before: where every byte-level pattern cuts, text can be cut and its pieces looked up one by one.

The patterns of GPT-2, Llama 3, Qwen and their kin end a token before white space that follows something else, unless
that is a mark that takes the line ends behind it along. A piece is white space and what follows it, so its ids do not
depend on its neighbours: words of prose come back thousands of times, and a lookup costs a sixth of tokenising.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

__all__ = ["WordCache", "cuts_at_words"]

# White space as the tokenizers' patterns know it, which is not quite Python's.
_SPACE = r" \t\n\r\x0b\x0c\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_PIECE = re.compile(rf"[{_SPACE}]*[^{_SPACE}]+(?:(?<![A-Za-z0-9])[\r\n][{_SPACE}]*[^{_SPACE}]+)*|[{_SPACE}]+")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEXT_PATTERNS = frozenset(
    (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL,
        _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL,
        r"\n+[ \t]*|\p{N}| ?_*\p{L}+| ?[^\s\p{L}\p{N}]+|[ \t]+(?!\S)|\s",
    )
)
_DIGIT_PATTERNS = frozenset((r"\p{N}{1,3}", r"\p{N}"))
_LONGEST_WORD = 32
_MOST_WORDS = 2**16
# Tokenising a piece by itself costs as much more as this many characters within a text.
_PIECE_CHARACTERS = 10
# Below, pieces are learnt whatever they cost.
_SHORT = 4096


@dataclass(slots=True)
class _Row:
    """A text's pieces, and the ids of those that are known."""

    pieces: list[str]
    ids: list[bytes | None]

    def missing(self) -> dict[str, list[int]]:
        """Pieces that are not known, and where they are."""
        found: dict[str, list[int]] = {}
        for place, ids in enumerate(self.ids):
            if ids is None:
                found.setdefault(self.pieces[place], []).append(place)
        return found


class WordCache:
    """Packed ids by word; when `_MOST_WORDS` are known it begins anew. `encode` gives packed ids of several texts."""

    def __init__(self, encode: Callable[[Sequence[str]], list[bytes]]) -> None:
        self._encode = encode
        self._words: dict[str, bytes] = {}

    def ids(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of texts between special tokens: those of their words, or of the whole where few words are known."""
        known = self._words.get
        rows = [_Row(pieces, [known(piece) for piece in pieces]) for pieces in map(_PIECE.findall, texts)]
        new = [place for place, row in enumerate(rows) if None in row.ids]
        whole: dict[int, bytes] = {}
        if new:
            whole = self._find(texts, rows, new)
        # No id is missing where the whole is not taken.
        return [whole[place] if place in whole else b"".join(row.ids) for place, row in enumerate(rows)]  # type: ignore[arg-type]

    def _find(self, texts: Sequence[str], rows: Sequence[_Row], new: Sequence[int]) -> dict[int, bytes]:
        """Fills in what rows at places `new` do not know; the ids of texts that were rather tokenised whole."""
        missing = {place: rows[place].missing() for place in new}
        unknown = dict.fromkeys(piece for row in missing.values() for piece in row)
        whole: list[int] = []
        if not _worth(unknown, sum(len(texts[place]) for place in new)):
            # Some of them may be new through and through.
            whole = [place for place in new if not _worth(missing[place], len(texts[place]))]
            unknown = dict.fromkeys(piece for place in new if place not in whole for piece in missing[place])
        asked = [*(texts[place] for place in whole), *unknown]
        encoded = dict(zip(asked, self._encode(asked), strict=True))
        fresh = {piece: encoded[piece] for piece in unknown}
        for place in new:
            if place not in whole:
                for piece, at in missing[place].items():
                    for index in at:
                        rows[place].ids[index] = fresh[piece]
        self._learn(fresh)
        return {place: encoded[texts[place]] for place in whole}

    def _learn(self, fresh: dict[str, bytes]) -> None:
        if len(self._words) + len(fresh) > _MOST_WORDS:
            self._words.clear()
        self._words.update((piece, ids) for piece, ids in fresh.items() if len(piece) <= _LONGEST_WORD)


def _worth(missing: Collection[str], characters: int) -> bool:
    """Whether so many unknown pieces cost less than tokenising a text of so many characters."""
    return characters <= _SHORT or len(missing) * _PIECE_CHARACTERS + sum(map(len, missing)) <= characters


def cuts_at_words(tokenizer: Tokenizer) -> bool:
    """Whether the ids of a text are those of its pieces: its steps are known to look no further."""
    description = json.loads(tokenizer.to_str())
    reaching = ("normalized", "lstrip", "rstrip", "single_word")
    if any(token[flag] for token in description.get("added_tokens", ()) for flag in reaching):
        return False
    if description.get("normalizer") not in (None, {"type": "NFC"}):
        return False
    steps = list(_steps(description.get("pre_tokenizer")))
    return any(map(_cuts_before_space, steps)) and all(map(_looks_no_further, steps))


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for part in step["pretokenizers"]:
            yield from _steps(part)
    else:
        yield step


def _cuts_before_space(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return bool(step.get("use_regex", True))
    return step["type"] == "Split" and step["pattern"].get("Regex") in _TEXT_PATTERNS


def _looks_no_further(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "ByteLevel":
            return not step["add_prefix_space"]
        case "Digits":
            return True
        case "Split":
            isolated = step["behavior"] == "Isolated" or (step["behavior"] == "Removed" and step["invert"])
            return isolated and step["pattern"].get("Regex") in _TEXT_PATTERNS | _DIGIT_PATTERNS
    return False
