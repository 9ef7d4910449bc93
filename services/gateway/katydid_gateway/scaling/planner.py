"""How many engines of a role there should be, from what they have to do: absolute numbers, not ratios of the present.

    prefill = (work that comes, as it will be when a new engine is up) / target share + backlog / time to clear it
    decode  = ready * time per token / (share of its target)
    cache   = ready * pages of all choices, running and waiting / share of the pages

Work that comes is in engines: seconds of one engine's work a second. Two exponential averages of it, a fast one and a
slow one, lag behind a ramp by their time constants; their difference is its slope, which carries the forecast over the
time an engine takes to start. The needs of decode and cache are averages of two minutes: a burst is over before an
engine has started. What was needed in the last `hold_s` stays, so a lull takes nobody away. The plan never falls below
the ready engines while one drains, whose work may yet come back, nor in the first `warm_up_s` of a new one, whose
caches are empty. An engine that starts changes nothing: numbers are absolute, so it is not asked for twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from katydid_runtime.metrics import TPOT_TARGET_S

from katydid_gateway.scaling.signals import RoleLoad

__all__ = ["Planner", "ScalingPlan", "ScalingTerms"]

# A need that is so little above a whole number does not ask for one more engine.
_SLACK = 0.05


@dataclass(frozen=True, slots=True)
class ScalingTerms:
    """What the plan aims at; times in seconds.

    `start_s` is from the wish for an engine to its first request. At `prefill_share` of prefill work, queueing leaves
    room in the time to first token; above `decode_share` of the target time per token, and above `cache_share` of pages
    held, bursts find none.
    """

    start_s: float = 240.0
    hold_s: float = 600.0
    warm_up_s: float = 120.0
    clear_s: float = 60.0
    tpot_s: float = TPOT_TARGET_S
    prefill_share: float = 0.6
    decode_share: float = 0.8
    cache_share: float = 0.85
    fast_s: float = 120.0
    slow_s: float = 900.0


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """`desired` whole engines; `needed` by kind of work, in fractions of engines."""

    desired: int
    needed: Mapping[str, float]


@dataclass(slots=True)
class Planner:
    """The plan of one role: `observe` its load every few seconds, time passed in."""

    terms: ScalingTerms = ScalingTerms()
    _at: float | None = None
    _offered: float = 0.0
    _speed: float = 0.0
    _fast: float = 0.0
    _slow: float = 0.0
    _settled_at: float | None = None
    _averages: dict[str, float] = field(default_factory=dict)
    _ready: int = 0
    _warm_at: float = 0.0
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)
    _plan: ScalingPlan = ScalingPlan(1, {"prefill": 0.0, "decode": 0.0, "cache": 0.0})

    def observe(self, load: RoleLoad, now: float) -> ScalingPlan:
        """The plan as of now. While no engine is ready, nothing is known and the last plan stands."""
        if self._at is not None and now <= self._at:
            return self._plan
        self._follow(load, now)
        if load.ready == 0:
            return self._plan
        if load.ready > self._ready:
            self._warm_at = now + (self.terms.warm_up_s if self._ready else 0.0)
        self._ready = load.ready
        needed = {"prefill": self._prefill(load), **self._settled(load, now)}
        wanted = max(1, math.ceil(max(needed.values()) - _SLACK))
        # Newer and larger makes the ones before it worthless: the first one left is the largest of the window.
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self.terms.hold_s:
            self._wanted.popleft()
        floor = load.ready if load.draining or now < self._warm_at else 1
        self._plan = ScalingPlan(max(self._wanted[0][1], floor), needed)
        return self._plan

    def _follow(self, load: RoleLoad, now: float) -> None:
        """Bring the averages of offered work up to now; the first observation only begins."""
        if load.ready:
            self._speed = load.prefill_speed / load.ready
        if self._at is not None and self._speed:
            elapsed = now - self._at
            work = max(0.0, load.offered_tokens - self._offered) / self._speed / elapsed
            self._fast += (work - self._fast) * -math.expm1(-elapsed / self.terms.fast_s)
            self._slow += (work - self._slow) * -math.expm1(-elapsed / self.terms.slow_s)
        self._at, self._offered = now, load.offered_tokens

    def _prefill(self, load: RoleLoad) -> float:
        terms = self.terms
        slope = max(0.0, (self._fast - self._slow) / (terms.slow_s - terms.fast_s))
        forecast = self._fast + slope * (terms.fast_s + terms.start_s)
        backlog = load.waiting_tokens / self._speed if self._speed else 0.0
        # A second of prompts before each engine is how continuous batching works, and no backlog.
        return forecast / terms.prefill_share + max(0.0, backlog - load.ready) / terms.clear_s

    def _settled(self, load: RoleLoad, now: float) -> dict[str, float]:
        """Needs of decode and cache, averaged: a burst of seconds is over before an engine has started."""
        present = {"decode": self._decode(load), "cache": self._cache(load)}
        share = 1.0 if self._settled_at is None else -math.expm1(-(now - self._settled_at) / self.terms.fast_s)
        self._settled_at = now
        for work, need in present.items():
            known = self._averages.get(work, 0.0)
            self._averages[work] = known + share * (need - known)
        return dict(self._averages)

    def _decode(self, load: RoleLoad) -> float:
        if not load.running or not load.decode_speed:
            return 0.0
        return load.ready * load.running / load.decode_speed / (self.terms.decode_share * self.terms.tpot_s)

    def _cache(self, load: RoleLoad) -> float:
        if not load.running:
            return 0.0
        whole = load.cache_pressure * (load.running + load.waiting) / load.running
        return load.ready * whole / self.terms.cache_share
