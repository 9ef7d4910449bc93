"""Bounds where hidden values are rounded to e4m3 by two sums of their own, so that a near tie may fall either way.

In a result of few tokens one such element can be 3e-2 of the whole, one draw in some hundred, by no fault of a kernel.
So few tokens are drawn several times: the bound of many tokens holds for the middle of the draws, and no draw is worse
than such elements make it. A fault of a kernel's is in every draw.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["FEW_TOKENS", "assert_error"]

FEW_TOKENS, WORST_OF_FEW = 8, 6e-2
_DRAWS = 5


def assert_error(check: Callable[[], float], bound: float, tokens: int) -> None:
    """``check`` draws operands for so many tokens and returns the error of a result, which must be below ``bound``."""
    if tokens > FEW_TOKENS:
        error = check()
        assert error < bound, (error, tokens)
        return
    errors = sorted(check() for _ in range(_DRAWS))
    assert errors[_DRAWS // 2] < bound, (errors, tokens)
    assert errors[-1] < max(bound, WORST_OF_FEW), (errors, tokens)
