"""How many requests may be tried again: a share of those that came, so that retries never become the load.

What an engine that is there refuses is tried elsewhere within this budget. Requests of an engine that is gone or about
to go are not counted: they go on elsewhere, all of them.
"""

from __future__ import annotations

__all__ = ["RetryBudget"]

SHARE = 0.1
# What a quiet gateway may try again at once, and the most it saves up.
LEAST, MOST = 10.0, 100.0


class RetryBudget:
    """A tenth of the requests, and ten."""

    def __init__(self) -> None:
        self._left = LEAST

    def came(self) -> None:
        """A request was sent for the first time."""
        self._left = min(MOST, self._left + SHARE)

    def take(self) -> bool:
        """Whether a request may be tried again now."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
