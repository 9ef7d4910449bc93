"""How long blocks live: from their write or from their last use, by themselves or as long as a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Keep", "Lifetime", "Lifetimes", "SessionTerms"]

_SWEEP = 1024


@dataclass(frozen=True, slots=True)
class Lifetime:
    """`ttl_s` seconds from the write, or with `sliding` from the last use; 0 is for ever."""

    ttl_s: float = 0.0
    sliding: bool = False


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """A session's 16-byte id, and its lifetime as a client tells it; None: the policy's."""

    id: bytes
    lifetime: Lifetime | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """How long a write's blocks are to live, as a client tells it. Without a `lifetime`, a session gives its own."""

    lifetime: Lifetime | None = None
    session: SessionTerms | None = None


class _Session(NamedTuple):
    ends_at: float
    lifetime: Lifetime


class Lifetimes:
    """Turns what policy and clients say into times at which blocks end. `now` gives Unix seconds."""

    def __init__(self, blocks: Lifetime, sessions: Lifetime, now: Callable[[], float]) -> None:
        self._blocks = blocks
        self._sessions_default = sessions
        self._now = now
        self._sessions: dict[bytes, _Session] = {}
        self._sweep_at = _SWEEP

    def __len__(self) -> int:
        """Sessions known."""
        return len(self._sessions)

    def of_write(self, keep: Keep) -> tuple[float, float]:
        """When a block written now ends (Unix seconds, 0: never), and the seconds it gets anew with every use."""
        if keep.lifetime is None and keep.session is not None and (ends_at := self.use(keep.session)):
            return ends_at, 0.0
        lifetime = keep.lifetime or self._blocks
        if not lifetime.ttl_s:
            return 0.0, 0.0
        return self._now() + lifetime.ttl_s, lifetime.ttl_s if lifetime.sliding else 0.0

    def use(self, session: SessionTerms | None) -> float:
        """A session does something: begins, goes on, or begins anew. When it ends (Unix seconds; 0: never)."""
        if session is None:
            return 0.0
        now = self._now()
        known = self._sessions.get(session.id)
        if known is not None and known.ends_at > now:
            if not known.lifetime.sliding:
                return known.ends_at
            lifetime = known.lifetime
        else:
            lifetime = session.lifetime or self._sessions_default
        if not lifetime.ttl_s:
            return 0.0
        self._sessions[session.id] = _Session(now + lifetime.ttl_s, lifetime)
        self._forget_ended(now)
        return now + lifetime.ttl_s

    def _forget_ended(self, now: float) -> None:
        """Drop sessions that have ended, each time twice as many are known as lived after the last time."""
        if len(self._sessions) >= self._sweep_at:
            self._sessions = {key: session for key, session in self._sessions.items() if session.ends_at > now}
            self._sweep_at = max(_SWEEP, 2 * len(self._sessions))
