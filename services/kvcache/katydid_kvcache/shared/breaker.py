"""Leaves alone what fails: after some failures in a row nothing is tried for a while, longer each time."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Breaker"]


class Breaker:
    """Opens after `failures` failures in a row, for `first_s` seconds, then doubling up to `longest_s`.

    When the time is over one try is allowed; it closes the breaker or opens it again. `now` gives monotonic seconds.
    """

    def __init__(self, *, failures: int, first_s: float, longest_s: float, now: Callable[[], float]) -> None:
        self._limit = failures
        self._first_s = first_s
        self._longest_s = longest_s
        self._now = now
        self._failures = 0
        self._openings = 0
        self._opened_until = 0.0
        self._trying = False

    @property
    def closed(self) -> bool:
        """Whether a try has a chance; asking changes nothing."""
        return self._now() >= self._opened_until

    def allow(self) -> bool:
        """Whether to try now. While the breaker was open and its time is over, True is said once for each period."""
        if not self.closed:
            return False
        if self._openings:
            # Others are to wait for what becomes of this try.
            self._opened_until = self._now() + self._first_s
            self._trying = True
        return True

    def succeeded(self) -> None:
        self._failures = self._openings = 0
        self._opened_until = 0.0
        self._trying = False

    def failed(self) -> None:
        if not self.closed and not self._trying:
            return  # it was under way when others opened the breaker, and tells nothing new
        self._failures += 1
        self._trying = False
        if self._failures >= self._limit:
            self._opened_until = self._now() + min(self._longest_s, self._first_s * 2**self._openings)
            self._openings += 1
