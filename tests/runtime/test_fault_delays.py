"""Delays as words: seconds by point, or what is wrong with which part."""

from __future__ import annotations

import pytest
from katydid_runtime.fault_delays import delays_at

read = delays_at("queue", "decode")


def test_milliseconds_become_seconds_by_point() -> None:
    assert read("queue:50, decode:2.5") == {"queue": 0.05, "decode": 0.0025}
    assert read("") == {}


def test_what_is_no_text_passes() -> None:
    assert read({"queue": 1.0}) == {"queue": 1.0}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("lunch:5", "'lunch:5': expected one of queue, decode"),
        ("queue=5", "one of queue, decode"),
        ("queue:1,decode:soon", "'decode:soon': expected milliseconds"),
        ("queue:-1", "0 to 60000"),
        ("queue:60001", "0 to 60000"),
        ("queue:nan", "0 to 60000"),
    ],
)
def test_the_wrong_part_is_named(words: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(words)
