"""Texts whose token ids gateway and engine compare before the first request: what equal files do not prove.

Two processes may read the same tokenizer.json and cut text differently, with another release of the library or through
a cache with a defect. Each tokenises these texts in its own way; the digest of the ids tells whether they agree.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from katydid_runtime.block_hash import pack_ids

__all__ = ["GOLDEN_TEXTS", "golden_digest", "tokenised_alone"]

GOLDEN_TEXTS = (
    "You are a helpful agent. Use the tools that you are given.",
    "def area(width: float, height: float) -> float:\n    return width * height  # square metres\n\n\n",
    '{"name": "search", "arguments": {"query": "d\\u00fcnn \\"quoted\\"", "limit": 10, "exact": false}}',
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. "
    "敏捷的棕色狐狸跳过了懒狗。 Съешь ещё этих мягких булок.",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \u00e9 e\u0301 \ufdfa "
    "\u200b\ufefftabs\tand\r\nline ends \u00a0 spaces   trailing  ",
    "0 1 12 123 1234 12345 3.14159 1e-12 0xDEADBEEF 192.168.0.1 2026-11-29T00:00:00Z",
    "word " * 300,
)
"""Prose, code, JSON, scripts, joiners and odd spaces, numbers, and one long enough for several blocks."""


def golden_digest(ids_of: Sequence[bytes]) -> bytes:
    """SHA-256 (32 bytes) of the packed ids of all golden texts, in their order, each length-prefixed."""
    digest = sha256(b"katydid.golden.v1")
    for ids in ids_of:
        digest.update(len(ids).to_bytes(8, "little") + ids)
    return digest.digest()


def tokenised_alone(folder: str | Path) -> bytes:
    """The digest by the tokenizers library alone, from the folder's tokenizer.json; empty where it is not installed."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return b""
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    ids_of = (tokenizer.encode(text, add_special_tokens=False).ids for text in GOLDEN_TEXTS)
    return golden_digest([pack_ids(array("I", ids)) for ids in ids_of])
