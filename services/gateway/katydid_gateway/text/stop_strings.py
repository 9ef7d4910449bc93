"""Finds stop strings in streamed text, the same ones whatever the chunks.

The stop string whose last character comes first wins; of several ending there, the longest. Text that may still become
a stop string is held back, and no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence

from katydid_gateway.text.partial_match import held_suffix

__all__ = ["StopFinder"]


class StopFinder:
    """Searches one stream. `found` becomes the stop string of the first match; text fed afterwards is dropped.

    With `include` the stop string itself is part of the output.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether there was a match."""
        return self.found is not None

    @property
    def held(self) -> int:
        """Characters held back now."""
        return len(self._held)

    def feed(self, text: str) -> str:
        """The text that is certain now."""
        if self.stopped:
            return ""
        buffer = self._held + text
        found = self._first_match(buffer)
        if found is not None:
            start, end = found
            self.found = buffer[start:end]
            self._held = ""
            return buffer[: end if self._include else start]
        keep = held_suffix(buffer, self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """What was held back, when the stream ends without a match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, int] | None:
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[1] or (end == best[1] and start < best[0]):
                best = (start, end)
        return best
