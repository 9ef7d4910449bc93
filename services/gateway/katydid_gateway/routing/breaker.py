"""Leaves an engine alone that fails what it is sent, although it is connected and well: a circuit breaker.

Failures in a row, without an answer between them, open it; after a while it closes for trial, and the next failure
opens it again, for twice as long. Refusals that say nothing about the engine (full, draining, the caller's fault) do
not count.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAILING", "FAILURES", "Breaker"]

FAILING = "fails its requests"
# So many failures in a row.
FAILURES = 5
FIRST_S, LONGEST_S = 5.0, 60.0


@dataclass(slots=True)
class Breaker:
    """One engine's; times are seconds of one monotonic clock."""

    failures: int = 0
    open_until: float = 0.0
    _open_s: float = 0.0

    def failed(self, now: float) -> None:
        """The engine failed a request."""
        self.failures += 1
        # What was under way when it opened fails too, and says nothing new.
        if self.failures >= FAILURES and now >= self.open_until:
            self._open_s = min(LONGEST_S, 2 * self._open_s) if self._open_s else FIRST_S
            self.open_until = now + self._open_s

    def answered(self) -> None:
        """The engine gave a request its first token: it is well."""
        self.failures, self.open_until, self._open_s = 0, 0.0, 0.0

    def is_open(self, now: float) -> bool:
        """Whether it gets nothing now."""
        return now < self.open_until
