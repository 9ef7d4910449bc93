"""Seconds through the protobuf message and back, against the message's own arithmetic."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from katydid_runtime.duration import to_duration, to_seconds


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.25, 59.999999999, 86_400.0, -0.5, -1.25])
def test_seconds_survive_the_message(seconds: float) -> None:
    message = to_duration(seconds)
    assert message.ToNanoseconds() == round(seconds * 1e9)
    assert to_seconds(message) == pytest.approx(seconds, abs=1e-9)


def test_a_message_whose_parts_contradict_each_other_is_still_a_number() -> None:
    assert to_seconds(Duration(seconds=2, nanos=-500_000_000)) == 1.5
