"""Reads one tool call written as a JSON object, `{"name": ..., "arguments": {...}}`, while its text arrives.

The arguments leave as the model wrote them, as soon as the name is known; nothing is parsed twice.
"""

from __future__ import annotations

import json

__all__ = ["JsonCallReader"]

_ARGUMENTS = ("arguments", "parameters")


class JsonCallReader:
    """Feed it text until `ended`. `name` is None until it is known; `raw` is everything that was read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.raw = ""
        self.ended = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._string = ""
        self._key: str | None = None
        self._in_value = False
        self._waiting = ""
        self._quoted = False
        self.wrote = False

    def feed(self, text: str) -> tuple[str, int]:
        """(new text of the arguments, how many characters of `text` belong to the object)."""
        for place, character in enumerate(text):
            if self.ended:
                return self._certain(), place
            self.raw += character
            self._read(character)
        return self._certain(), len(text)

    def _read(self, character: str) -> None:
        if self._in_string:
            self._in_character(character)
            return
        if character == '"':
            self._in_string, self._string = True, '"'
            self._quoted = self._quoted or (self._in_arguments and not self._waiting and not self.wrote)
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self.ended, self._in_value = True, False
                return
        elif character == ":" and self._depth == 1:
            self._in_value = True
            return
        elif character == "," and self._depth == 1:
            self._in_value, self._key = False, None
            return
        self._keep(character)

    def _in_character(self, character: str) -> None:
        self._string += character
        self._keep(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1:
                self._string_ended()

    def _string_ended(self) -> None:
        try:
            value = json.loads(self._string, strict=False)
            # Half a surrogate pair, which JSON can escape, is no text that a client can be sent.
            value.encode()
        except ValueError:
            return
        if not self._in_value:
            self._key = value
        elif self._key == "name":
            self.name = value
        elif self._in_arguments and self._quoted:
            # Some models write their arguments as a text that holds JSON: what is in it is what was meant.
            self._waiting, self._quoted = value, False

    @property
    def _in_arguments(self) -> bool:
        return self._in_value and self._key in _ARGUMENTS

    def _keep(self, character: str) -> None:
        if self._in_arguments and (self._waiting or self.wrote or not character.isspace()):
            self._waiting += character

    def _certain(self) -> str:
        if self.name is None or self._quoted:
            return ""
        certain, self._waiting = self._waiting, ""
        if self.ended:
            certain = certain.rstrip()
        elif certain:
            # Space behind the object is not part of it, and space within it comes with what follows.
            kept = certain.rstrip()
            certain, self._waiting = kept, certain[len(kept) :]
        self.wrote = self.wrote or bool(certain)
        return certain
