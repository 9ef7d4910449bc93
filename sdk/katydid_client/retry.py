"""Whether, and after how long, a failed request is sent again.

Only errors that say so themselves are retried, and only while nothing of the answer has been delivered; the caller of
`delay_s` sees to the latter. Waits double from half a second to eight, with jitter so that clients that failed together
do not return together; a server's own `retry_after_s` takes their place.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from katydid_runtime.errors import KatydidError

__all__ = ["delay_s"]

_FIRST_S = 0.5
_LONGEST_S = 8.0
_LONGEST_ASKED_S = 120.0


def delay_s(
    error: KatydidError, failures: int, max_retries: int, left_s: float, jitter: Callable[[], float] = random.random
) -> float | None:
    """Seconds to wait after the `failures`-th failure, or None to give up.

    Gives up when the error is not retryable, `max_retries` are used, the server asks for more than two minutes, or the
    wait would not end before the request's remaining `left_s` seconds.
    """
    if not error.retryable or failures > max_retries:
        return None
    if error.retry_after_s is not None:
        wait = error.retry_after_s
        if wait > _LONGEST_ASKED_S:
            return None
    else:
        wait = min(_LONGEST_S, _FIRST_S * 2 ** (failures - 1)) * (0.5 + 0.5 * jitter())
    return wait if wait < left_s else None
