"""What a start spends its time on: phases one after the other, from the moment the face starts a process."""

from __future__ import annotations

import time

__all__ = ["StartTimes"]


class StartTimes:
    """Phases that began at ``since``, a time of the host's monotonic clock, which its processes share."""

    def __init__(self, since: float) -> None:
        self._last = since
        self._seconds: dict[str, float] = {}

    def over(self, phase: str) -> None:
        """``phase`` is over: it took the time since the one before, and more where it was told before."""
        now = time.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    @property
    def seconds(self) -> dict[str, float]:
        """By phase, in their order."""
        return dict(self._seconds)
