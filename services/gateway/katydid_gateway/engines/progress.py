"""Whether an engine that answers still works: requests in flight, and neither a token nor a computed prompt for long.

How long is long depends on what it was given: fetching a prompt of 200K tokens shows nothing for seconds. So the bound
grows with the longest time to first token that was predicted for what is in flight.
"""

from __future__ import annotations

__all__ = ["GRAMMAR_S", "WEDGED", "ProgressWatch"]

WEDGED = "makes no progress"
# No sign for so long, plus a multiple of what was predicted: no new requests; patience in health.py ends the rest.
LEAST_S = 3.0
MULTIPLE = 2.0
MOST_S = 120.0
# Engines say nothing while they compile a grammar, which takes seconds, in a process that may have to start.
GRAMMAR_S = 10.0


class ProgressWatch:
    """One engine's; times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._expected: dict[int, float] = {}
        self._moved_at = 0.0
        self._uncached = 0

    def sent(self, request: int, expected_s: float, now: float) -> None:
        """A request is on its way whose first token is expected after so long."""
        if not self._expected:
            self._moved_at = now
        self._expected[request] = expected_s

    def ended(self, request: int, now: float) -> None:
        """It has ended, or nobody waits for it."""
        if self._expected.pop(request, None) is not None:
            self._moved_at = now

    def moved(self, now: float) -> None:
        """A token or a first sign of a request came."""
        self._moved_at = now

    def reported(self, uncached_tokens: int, now: float) -> None:
        """The engine says how many prompt tokens it still has to compute: fewer than before is progress."""
        if uncached_tokens < self._uncached:
            self._moved_at = now
        self._uncached = uncached_tokens

    def wedged(self, now: float) -> bool:
        """Whether it should have shown something by now."""
        if not self._expected:
            return False
        return now - self._moved_at > min(MOST_S, LEAST_S + MULTIPLE * max(self._expected.values()))
