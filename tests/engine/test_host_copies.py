"""When a device was done with something, as a host tells it that comes to see it later."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine import host_copies
from katydid_engine.host_copies import Arriving


class Device:
    """Events that it reaches at given times, on a clock of its own that goes as the host's does; seconds."""

    def __init__(self, ends: list[float]) -> None:
        self.now = 0.0
        self._ends = iter(ends)

    def Event(self, *, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        end = next(self._ends)

        def synchronize() -> None:
            self.now = max(self.now, end)

        return SimpleNamespace(
            end=end,
            record=lambda stream: None,
            query=lambda: end <= self.now,
            synchronize=synchronize,
            elapsed_time=lambda other: 1000 * (other.end - end),
        )


def steps(lengths: list[float], pauses: list[float]) -> list[tuple[float, float, float]]:
    """Of steps of such lengths, after each of which a host pauses so long before it asks for the next: when the device
    was done, when the host saw it, and what is told."""
    ends = [sum(lengths[: count + 1]) for count in range(len(lengths))]
    device = Device(ends)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "Event", device.Event)
        patched.setattr(torch.cuda, "current_stream", lambda of: of)
        patched.setattr(host_copies, "time", SimpleNamespace(monotonic=lambda: device.now))
        arriving = [Arriving(torch.device("cuda", 0)) for _ in lengths]
        found, before = [], None
        for end, one, pause in zip(ends, arriving, pauses, strict=True):
            device.now += pause
            one.wait()
            seen = device.now
            device.now += 0.25
            one.wait()
            told = one.done_at(before)
            assert told is not None
            assert told == one.done_at(before), "asked again it says the same"
            found.append((end, seen, told))
            before = one
    return found


_TIMES = st.integers(0, 20).map(lambda tenths: tenths / 10)


@given(st.lists(st.tuples(_TIMES, _TIMES), min_size=1, max_size=12))
def test_what_was_waited_for_once_is_known_from_then_on(drawn: list[tuple[float, float]]) -> None:
    known = False
    for end, seen, told in steps([length for length, _ in drawn], [pause for _, pause in drawn]):
        assert end - 1e-9 <= told <= seen + 1e-9
        known = known or abs(seen - end) < 1e-9
        assert not known or told == pytest.approx(end)


def test_a_host_that_never_waits_knows_no_more_than_what_it_saw_first() -> None:
    assert steps([1, 1, 1], [5, 0, 0]) == [(1, 5, 5), (2, 5.25, 5.25), (3, 5.5, 5.5)]
    assert steps([1, 1, 1], [0, 5, 0])[1:] == [(2, 6.25, 2), (3, 6.5, 3)]


def test_on_a_host_nothing_is_told() -> None:
    one = Arriving(torch.device("cpu"))
    one.wait()
    assert one.done_at(None) is None


@pytest.mark.gpu
def test_the_end_of_what_nobody_waited_for() -> None:
    device = torch.device("cuda")
    work = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    first = Arriving(device)
    first.wait()
    before = time.monotonic()
    for _ in range(20):
        work.fill_(1)
    second = Arriving(device)
    second._event.synchronize()  # type: ignore[union-attr]
    seen = time.monotonic()
    time.sleep(0.1)
    second.wait()
    told = second.done_at(first)
    assert told is not None
    assert before < told < seen + 0.01
