"""When a request is sent again, and after how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_client.retry import delay_s
from katydid_runtime.errors import InvalidRequestError, UnavailableError


@given(st.integers(1, 40), st.floats(0, 1, exclude_max=True))
def test_waits_double_to_eight_seconds_and_jitter_takes_at_most_half(failures: int, dice: float) -> None:
    wait = delay_s(UnavailableError("gone"), failures, 40, 100.0, lambda: dice)
    longest = min(8.0, [0.5, 1.0, 2.0, 4.0, 8.0][min(failures, 5) - 1])
    assert wait is not None
    assert longest / 2 <= wait <= longest


def test_it_gives_up() -> None:
    gone = UnavailableError("gone")
    assert delay_s(InvalidRequestError("no", field="n", value=0, allowed="1"), 1, 5, 100.0) is None
    assert delay_s(gone, 6, 5, 100.0) is None
    assert delay_s(gone, 1, 5, 0.4, lambda: 0.9) is None


@pytest.mark.parametrize(("asked", "wait"), [(3.0, 3.0), (119.0, None), (121.0, None)])
def test_the_server_is_obeyed_up_to_two_minutes_and_to_what_is_left(asked: float, wait: float | None) -> None:
    error = UnavailableError("full", retry_after_s=asked)
    assert delay_s(error, 1, 5, 100.0, lambda: 0.0) == wait
