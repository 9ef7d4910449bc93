"""When blocks end: fixed and sliding times, and sessions that are kept alive by use."""

from __future__ import annotations

from katydid_kvcache.policy.lifetimes import Keep, Lifetime, Lifetimes, SessionTerms

S = b"s" * 16


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(blocks: Lifetime = Lifetime(), sessions: Lifetime = Lifetime()) -> tuple[Lifetimes, Clock]:
    clock = Clock()
    return Lifetimes(blocks, sessions, clock), clock


def test_what_the_client_says_wins_over_the_policy() -> None:
    lifetimes, _ = make(Lifetime(50))
    assert lifetimes.of_write(Keep()) == (1050.0, 0.0)
    assert lifetimes.of_write(Keep(Lifetime(5, sliding=True))) == (1005.0, 5)
    assert lifetimes.of_write(Keep(Lifetime(0))) == (0.0, 0.0)


def test_blocks_of_a_session_end_with_it() -> None:
    lifetimes, clock = make(Lifetime(50), Lifetime(100))
    assert lifetimes.of_write(Keep(session=SessionTerms(S))) == (1100.0, 0.0)
    clock.now = 1060.0
    assert lifetimes.of_write(Keep(session=SessionTerms(S))) == (1100.0, 0.0), "a fixed session is not put off"
    assert lifetimes.of_write(Keep(Lifetime(5), SessionTerms(S))) == (1065.0, 0.0), "a time of its own wins"
    clock.now = 1101.0
    assert lifetimes.use(SessionTerms(S)) == 1201.0, "it has ended: another begins"


def test_a_sliding_session_ends_after_its_last_use() -> None:
    lifetimes, clock = make()
    mine = SessionTerms(S, Lifetime(100, sliding=True))
    assert lifetimes.use(mine) == 1100.0
    clock.now = 1090.0
    assert lifetimes.use(SessionTerms(S, Lifetime(7))) == 1190.0, "its first terms stay"
    assert lifetimes.use(None) == 0.0
    assert lifetimes.use(SessionTerms(b"t" * 16)) == 0.0, "a session without a time bounds nothing"


def test_ended_sessions_are_forgotten() -> None:
    lifetimes, clock = make(sessions=Lifetime(10))
    for number in range(5000):
        clock.now += 1
        lifetimes.use(SessionTerms(number.to_bytes(16, "big")))
    assert len(lifetimes) < 1100
