"""Speeds that loads carry: separate for prefill and decode, steady while idle."""

from __future__ import annotations

from katydid_engine.messages import Load
from katydid_engine.speed import Speed


def test_speeds_follow_what_was_measured() -> None:
    speed = Speed()
    assert speed.fill(Load()) == Load()
    speed.note(512, 0, 0.5)
    speed.note(0, 8, 0.02)
    load = speed.fill(Load(running=3))
    assert (load.running, load.prefill_tokens_per_second, load.decode_tokens_per_second) == (3, 1020.0, 400.0)
    for _ in range(50):
        speed.note(512, 4, 0.25)
    assert abs(speed.fill(Load()).prefill_tokens_per_second - 2064) < 10
    assert speed.fill(Load()).decode_tokens_per_second == 400.0
    speed.note(5, 5, 0.0)
