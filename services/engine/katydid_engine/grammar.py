"""A constraint on a request's output as data: what the face checks, the worker compiles, and a plan carries."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

__all__ = ["MAX_BEGIN_AFTER", "Grammar", "GrammarError", "GrammarKind"]

MAX_BEGIN_AFTER = 16


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message says why, in the library's words, and is never empty."""


class GrammarKind(StrEnum):
    """The values are the fields of ``Grammar`` in engine.proto."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True)
class Grammar:
    """One constraint.

    Attributes:
        source: the text of the kind's field; of CHOICE the strings as a JSON array.
        begin_after: token ids after whose first occurrence in the output it begins; empty: with the output.
    """

    kind: GrammarKind
    source: str
    begin_after: tuple[int, ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of kind and source: what compiles to the same automaton."""
        return hashlib.sha256(f"{self.kind}\0{self.source}".encode()).digest()
