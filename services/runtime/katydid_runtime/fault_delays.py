"""Delays injected on purpose, written `point:milliseconds` with commas between them: every service's `--fault-delays`.

A test slows one point and sees that the phase it belongs to grows, and no other.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["delays_at"]

_LONGEST_MS = 60_000


def delays_at(*points: str) -> Callable[[object], object]:
    """A validator that reads `"queue:50,decode:2.5"` as seconds by point; what is no text passes unchanged.

    It raises ValueError naming the part that is wrong and what is allowed.
    """

    def read(value: object) -> object:
        if not isinstance(value, str):
            return value
        delays_s: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in value.split(","))):
            point, _, delay = part.partition(":")
            if point not in points:
                raise ValueError(f"{part!r}: expected one of {', '.join(points)}, then a colon and milliseconds")
            try:
                milliseconds = float(delay)
            except ValueError:
                raise ValueError(f"{part!r}: expected milliseconds after the colon") from None
            if not 0 <= milliseconds <= _LONGEST_MS:
                raise ValueError(f"{part!r}: expected 0 to {_LONGEST_MS} milliseconds")
            delays_s[point] = milliseconds / 1e3
        return delays_s

    return read
