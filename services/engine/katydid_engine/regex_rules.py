"""Holds a regular expression to what is enforced token by token: XGrammar passes over some of it with a warning.

It always matches whole texts. So `^` and `$` where a text begins and ends say nothing and are taken out; elsewhere,
as lookaheads and escapes that it takes for letters, they would be ignored, and are refused here. A class that begins
with an escaped caret would be negated, and a dot take the end of a line: both are written otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["RegexError", "enforceable_regex"]

# An escape, a class, flags, the beginning of a group, or a character.
_PIECE = re.compile(r"\\.?|\[(?:\\.|[^\]\\])*\]|\(\?\w+\)|\(\?(?:[:=!]|<[=!]|P?<\w+>)|\(|.", re.DOTALL)
_ESCAPED_LETTERS = frozenset("dDwWsSnrtfvxuc")
_ESCAPE_IN_CLASS = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|.)", re.DOTALL)
_KNOWN_IN_CLASS = frozenset("dDwWsSnrtfvcb0")
_ESCAPED_CARET = re.compile(r"\\(?:\^|x5[eE]|u005[eE]|u\{0*5[eE]\})")


class RegexError(ValueError):
    """The expression asks for what is not enforced; the message says what and where."""


def enforceable_regex(pattern: str) -> str:
    """The expression as the library has to have it. Raises RegexError."""
    pieces = _PIECE.findall(pattern)
    outer = {*_outermost(pieces, "^"), *(len(pieces) - 1 - at for at in _outermost(_mirrored(pieces), "$"))}
    place = 0
    for at, piece in enumerate(pieces):
        if piece in ("(?=", "(?!"):
            raise RegexError(f"a lookahead ({piece}...) at character {place} cannot be enforced")
        if piece in ("^", "$") and at not in outer:
            raise RegexError(f"{piece} at character {place} cannot be enforced: text may lie on both sides of it")
        if piece[:1] == "\\" and piece[1:].isascii() and piece[1:].isalpha() and piece[1:] not in _ESCAPED_LETTERS:
            raise RegexError(f"{piece} at character {place} cannot be enforced")
        if piece[0] == "[" and piece[-1] == "]":
            pieces[at] = _enforceable_class(piece, place)
        elif piece == ".":
            pieces[at] = r"[^\n\r]"
        place += len(piece)
    return "".join(piece for at, piece in enumerate(pieces) if at not in outer)


def _enforceable_class(piece: str, place: int) -> str:
    for escape in _ESCAPE_IN_CLASS.findall(piece):
        plain = len(escape) == 2 and escape[1].isascii() and escape[1].isalnum()
        if plain and escape[1] not in _KNOWN_IN_CLASS:
            raise RegexError(f"{escape} in the class at character {place} cannot be enforced")
    caret = _ESCAPED_CARET.match(piece, 1)
    if caret is None:
        return piece
    rest = piece[caret.end() : -1].lstrip("^")
    if rest[:1] == "-" and len(rest) > 1:
        raise RegexError(f"a range that begins with a caret, in the class at character {place}, cannot be enforced")
    return f"(?:\\^|{_enforceable_class(f'[{rest}]', place)})" if rest else "\\^"


def _mirrored(pieces: Sequence[str]) -> list[str]:
    return [
        "(" if piece == ")" else ")" if piece[0] == "(" and piece[-1] != ")" else piece for piece in reversed(pieces)
    ]


def _outermost(pieces: Sequence[str], anchor: str) -> list[int]:
    """Places of `anchor` with nothing before them but brackets and alternatives, not within what is repeated."""
    found: list[int] = []
    begins = True
    groups: list[tuple[bool, int]] = []
    for at, piece in enumerate(pieces):
        if piece[0] == "(" and piece[-1] != ")":
            groups.append((begins, len(found)))
        elif piece == "|":
            begins = groups[-1][0] if groups else True
        elif piece == anchor and begins:
            found.append(at)
        elif piece[0] != "(":
            begins = False
            if piece == ")" and groups:
                _, before = groups.pop()
                if pieces[at + 1 : at + 2] in (["*"], ["+"], ["{"]):
                    del found[before:]
    return found
