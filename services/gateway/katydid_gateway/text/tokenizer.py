"""Text into packed token ids, off the event loop, remembering what was seen: whole beginnings, segments, words.

Tokenizers cut text at their added tokens before anything else, so the ids of a text are the ids of its segments, one
after the other, and an agent's next turn needs only its new segments tokenised (97 % of it was seen before).
`encode_batch_fast` in a thread is the form that lets go of the GIL; `encode` would freeze the loop for as long as it
takes (600 KB: half a second).
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from katydid_runtime.block_hash import pack_ids
from katydid_runtime.errors import ModelFolderError
from tokenizers import Tokenizer

from katydid_gateway.text.prefixes import Prefix, RecentPrefixes
from katydid_gateway.text.words import WordCache, cuts_at_words
from katydid_gateway.validation import prompt_too_long

__all__ = ["EncodedText", "SegmentCache", "TextTokenizer", "load_tokenizer"]

# Short misses are cheaper to tokenise here than to hand to a thread; looked up word by word, longer ones are too.
_INLINE_CHARACTERS = 2048
_INLINE_WORDS = 32_768
# The tokenizer takes 200 bytes a character where each is a token, so texts of more go one by one, and memory goes back.
_LARGE = 2**20
# What an entry costs beside its text and ids: dict node, str and bytes headers.
_ENTRY_BYTES = 256


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """tokenizer.json of a model folder without truncation or padding. Raises ModelFolderError."""
    path = Path(folder) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a missing file and for bad JSON alike
        raise ModelFolderError(f"cannot load {path}: {error}", field="model", value=str(folder)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class SegmentCache:
    """Packed ids by segment text, least recently used out first, within `capacity_bytes` of memory."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self.bytes = 0

    def get(self, segment: str) -> bytes | None:
        ids = self._entries.get(segment)
        if ids is not None:
            self._entries.move_to_end(segment)
        return ids

    def put(self, segment: str, ids: bytes) -> None:
        size = self._size(segment, ids)
        if size > self._capacity or segment in self._entries:
            return
        self._entries[segment] = ids
        self.bytes += size
        while self.bytes > self._capacity:
            self.bytes -= self._size(*self._entries.popitem(last=False))

    @staticmethod
    def _size(segment: str, ids: bytes) -> int:
        return _ENTRY_BYTES + len(ids) + len(segment) * (1 if segment.isascii() else 4)


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Packed ids; the prefix seen before that the text begins with, and the one it leaves for the next turn."""

    ids: bytes
    known: Prefix | None = None
    prefix: Prefix | None = None


class TextTokenizer:
    """Tokenises for one model; `encode` may be called from many tasks at once. Half of `cache_bytes` is for prefixes,
    half for segments."""

    def __init__(self, tokenizer: Tokenizer, cache_bytes: int = 0) -> None:
        self._tokenizer = tokenizer
        self._cache = SegmentCache(cache_bytes // 2)
        self._prefixes = RecentPrefixes(cache_bytes // 2)
        self._special = _special_ids(tokenizer)
        self._boundary = _boundary_pattern(tokenizer)
        self._before, self._after = _affixes(tokenizer)
        self._words = WordCache(self._encode_whole) if cache_bytes and cuts_at_words(tokenizer) else None
        self._large = asyncio.Lock()
        self._inline = _INLINE_CHARACTERS if self._words is None else _INLINE_WORDS

    async def encode(self, text: str, *, special_tokens: bool = False) -> bytes:
        """Ids as little-endian uint32; `special_tokens` adds what the tokenizer puts around a text of its own."""
        body = (await self.encode_prompt(text)).ids
        return self._before + body + self._after if special_tokens else body

    async def encode_prompt(self, text: str, most: int | None = None) -> EncodedText:
        """The same without tokens around it, and with what is known of its beginning.

        Raises PromptTooLongError where the added tokens alone are more than `most`: a million of them would take the
        loop's time for seconds, to be refused in the end.
        """
        if self._boundary is None:
            return EncodedText(b"".join(await self._segments([text])))
        known = self._prefixes.of(text)
        pieces = self._boundary.split(text[known.length :] if known is not None else text)
        if most is not None and len(pieces) // 2 > most:
            raise prompt_too_long(most, f"more than {most}")
        ids = await self._segments(pieces)
        body = b"".join(ids if known is None else (known.ids, *ids))
        if known is not None and len(pieces) == 1:
            return EncodedText(body, known, known)
        prefix = self._prefixes.put(text, len(text) - len(pieces[-1]), body, len(body) - len(ids[-1]))
        return EncodedText(body, known, prefix)

    def ids_of(self, marker: str) -> bytes:
        """The ids of a short text, such as a marker."""
        return self._special.get(marker) or self._encode_whole([marker])[0]

    async def _segments(self, pieces: Sequence[str]) -> list[bytes]:
        """The ids of each piece, most of which are known."""
        ids = [self._known(piece) for piece in pieces]
        missing = [place for place, found in enumerate(ids) if found is None]
        if missing:
            segments = [pieces[place] for place in missing]
            characters = sum(map(len, segments))
            if characters <= self._inline:
                encoded = self._encode_segments(segments)
            elif characters > _LARGE:
                async with self._large:
                    encoded = await asyncio.to_thread(self._encode_large, segments)
            else:
                encoded = await asyncio.to_thread(self._encode_segments, segments)
            for place, packed in zip(missing, encoded, strict=True):
                ids[place] = packed
                self._cache.put(pieces[place], packed)
        return [found or b"" for found in ids]

    def _known(self, piece: str) -> bytes | None:
        return self._special.get(piece) or self._cache.get(piece) if piece else b""

    def _encode_segments(self, segments: Sequence[str]) -> list[bytes]:
        return self._encode_whole(segments) if self._words is None else self._words.ids(segments)

    def _encode_large(self, segments: Sequence[str]) -> list[bytes]:
        try:
            return self._encode_segments(segments)
        finally:
            # Every thread's part of the heap would keep as much as its largest text took.
            if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
                trim(0)

    def _encode_whole(self, segments: Sequence[str]) -> list[bytes]:
        encodings = self._tokenizer.encode_batch_fast(list(segments), add_special_tokens=False)
        return [pack_ids(array("I", encoding.ids)) for encoding in encodings]


def _special_ids(tokenizer: Tokenizer) -> dict[str, bytes]:
    return {
        token.content: pack_ids(array("I", [id]))
        for id, token in tokenizer.get_added_tokens_decoder().items()
        if not token.normalized
    }


def _boundary_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Splits at every added token, longest first; None where splitting there would change the ids."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
    if not added or any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    if _marks_first_word(json.loads(tokenizer.to_str()).get("pre_tokenizer")):
        return None
    contents = sorted((token.content for token in added), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, contents))})")


def _marks_first_word(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether a Metaspace step treats the beginning of the whole text unlike the beginning of a segment."""
    if pre_tokenizer is None:
        return False
    return pre_tokenizer.get("prepend_scheme") == "first" or any(
        _marks_first_word(step) for step in pre_tokenizer.get("pretokenizers", ())
    )


def _affixes(tokenizer: Tokenizer) -> tuple[bytes, bytes]:
    """The packed ids a post-processor puts before and after a text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return pack_ids(array("I", whole[:start])), pack_ids(array("I", whole[start + len(bare) :]))
    raise ModelFolderError("the tokenizer's post-processor changes the ids of the text itself", field="model")
