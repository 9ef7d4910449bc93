"""Ids of words seen before: where every byte-level pattern cuts, text can be cut and its pieces looked up one by one.

The patterns of GPT-2, Llama 3, Qwen and their kin end a token before white space that follows something else, unless
that is a mark that takes the line ends behind it along. A piece is white space and what follows it, so its ids do not
depend on its neighbours: words of prose come back thousands of times, and a lookup costs a sixth of tokenising.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
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


class WordCache:
    """Packed ids by word; when `_MOST_WORDS` are known it begins anew. `encode` gives packed ids of several texts."""

    def __init__(self, encode: Callable[[Sequence[str]], list[bytes]]) -> None:
        self._encode = encode
        self._words: dict[str, bytes] = {}

    def ids(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of texts between special tokens: those of their words, or of the whole where few words are known."""
        ids: list[bytes] = []
        new: dict[int, tuple[list[str], list[bytes | None]]] = {}
        known = self._words.get
        for place, text in enumerate(texts):
            pieces = _PIECE.findall(text)
            found = [known(piece) for piece in pieces]
            if None in found:
                new[place] = pieces, found
                ids.append(b"")
            else:
                ids.append(b"".join(found))  # type: ignore[arg-type]  # none of them is None
        if new:
            self._encode_new(texts, new, ids)
        return ids

    def _encode_new(
        self, texts: Sequence[str], new: dict[int, tuple[list[str], list[bytes | None]]], ids: list[bytes]
    ) -> None:
        """Fills in the ids of texts with pieces that are not known: `new` has pieces and what is known, by place."""
        missing = {
            place: {piece: b"" for piece, known in zip(pieces, found, strict=True) if known is None}
            for place, (pieces, found) in new.items()
        }
        unknown: dict[str, bytes] = {piece: b"" for row in missing.values() for piece in row}
        whole: list[int] = []
        if not _worth(unknown, sum(len(texts[place]) for place in new)):
            # Some of them may be new through and through.
            whole = [place for place in new if not _worth(missing[place], len(texts[place]))]
            unknown = {piece: b"" for place in new if place not in whole for piece in missing[place]}
        encoded = self._encode([*(texts[place] for place in whole), *unknown])
        for place, packed in zip(whole, encoded, strict=False):
            ids[place] = packed
            del new[place]
        fresh = dict(zip(unknown, encoded[len(whole) :], strict=True))
        for place, (pieces, found) in new.items():
            ids[place] = b"".join(
                [fresh[piece] if known is None else known for piece, known in zip(pieces, found, strict=True)]
            )
        self._learn(fresh)

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
