"""Token ids into text as they come, never half a character: equal to decoding all ids at once, whatever the chunks.

Byte-level vocabularies (GPT-2's alphabet: Llama 3, Qwen, SmolLM2, Hy3) are a table from id to bytes and an incremental
UTF-8 decoder. That also survives output that is no UTF-8 at all, where `tokenizers.DecodeStream` raises "invalid
prefix". Other vocabularies decode a short window of ids, because there text depends on the token before.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Sequence
from typing import Protocol

from tokenizers import Tokenizer

__all__ = ["Detokenizer", "Vocabulary", "byte_alphabet"]

_REPLACEMENT = "�"
# A UTF-8 character has four bytes at most, so text that ends in U+FFFD so many ids in a row holds bad bytes.
_PATIENCE = 4


class Detokenizer(Protocol):
    """Text of one growing sequence of ids."""

    def feed(self, ids: Sequence[int]) -> str:
        """Characters that became complete with these ids."""

    def finish(self) -> str:
        """What is left of an incomplete character: U+FFFD, or nothing."""


class Vocabulary:
    """What each token id is as bytes, and which ids are special; makes detokenizers.

    `skip_special` leaves special tokens (BOS, EOS, turn markers) out of the text; `visible` ones stay in it, because a
    parser of the model's output looks for them, and some tokenizers declare them special.
    """

    def __init__(self, tokenizer: Tokenizer, visible: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self.size = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(id for id, token in added.items() if token.special and token.content not in visible)
        self._table = _byte_table(tokenizer) if _is_byte_level(tokenizer) else None
        self._visible = None if self._table is None else self._without_special(self._table)

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """A fresh detokenizer for one sequence."""
        table = self._visible if skip_special else self._table
        if table is not None:
            return _ByteDetokenizer(table)
        return _WindowDetokenizer(self._tokenizer, skip_special)

    def raw(self, token: int) -> bytes:
        """The bytes of one token by itself, b"" for an id no token has."""
        if self._table is not None:
            return self._table[token] if token < len(self._table) else b""
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of a whole sequence."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return detokenizer.feed(ids) + detokenizer.finish()

    def _without_special(self, table: list[bytes]) -> list[bytes]:
        return [b"" if id in self.special else content for id, content in enumerate(table)]


class _ByteDetokenizer:
    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        table = self._table
        try:
            return self._decoder.decode(b"".join([table[id] for id in ids]))
        except IndexError:  # an engine's vocabulary may be padded beyond the tokenizer's: such ids have no text
            return self._decoder.decode(b"".join([table[id] for id in ids if id < len(table)]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer:
    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._window = 0
        self._read = 0
        self._unfinished = 0

    def feed(self, ids: Sequence[int]) -> str:
        return "".join([self._feed_one(id) for id in ids])

    def finish(self) -> str:
        return self._advance() if self._read < len(self._ids) else ""

    def _feed_one(self, id: int) -> str:
        self._ids.append(id)
        text = self._decode(self._ids[self._window :])
        self._unfinished = self._unfinished + 1 if text.endswith(_REPLACEMENT) else 0
        return "" if 0 < self._unfinished < _PATIENCE else self._advance()

    def _advance(self) -> str:
        before = self._decode(self._ids[self._window : self._read])
        text = self._decode(self._ids[self._window :])
        if len(text) <= len(before):
            return ""
        self._window, self._read, self._unfinished = self._read, len(self._ids), 0
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's mapping from printable characters to the 256 bytes, which byte-level vocabularies are written in."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return [part.get("type") for part in parts] == ["ByteLevel"]


def _byte_table(tokenizer: Tokenizer) -> list[bytes]:
    alphabet = byte_alphabet()
    table = [b""] * (max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
    for token, id in tokenizer.get_vocab(with_added_tokens=True).items():
        try:
            table[id] = bytes([alphabet[character] for character in token])
        except KeyError:  # an added token, written as it is
            table[id] = token.encode()
    return table
