"""Durations: float seconds inside a process, `google.protobuf.Duration` between processes."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

__all__ = ["to_duration", "to_seconds"]


def to_duration(seconds: float) -> Duration:
    """Seconds as a message, to the nanosecond."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def to_seconds(duration: Duration) -> float:
    """A message as seconds; any message that arrived is accepted, also one whose parts contradict each other."""
    return duration.seconds + duration.nanos / 1e9
