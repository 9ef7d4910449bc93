"""Lists of token counts as people write them: "8K,32K,131072"."""

from __future__ import annotations

import re

from katydid_runtime.errors import SettingsError

__all__ = ["parse_lengths"]

_LENGTH = re.compile(r"(\d{1,9})([KM]?)")


def parse_lengths(field: str, text: str) -> list[int]:
    """Counts above zero; K is 1024. An empty text is an empty list.

    Raises:
        SettingsError: naming ``field``.
    """
    if not text.strip():
        return []
    lengths = []
    for part in text.split(","):
        found = _LENGTH.fullmatch(part.strip())
        if found is None or not int(found[1]):
            allowed = "numbers above zero like 8192 or 8K, by commas"
            raise SettingsError(f"{field}: {part!r}, expected {allowed}", field=field, value=text, allowed=allowed)
        lengths.append(int(found[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[found[2]])
    return lengths
