"""Rules that say how many engines there should be: the plan as the gateway makes it, and what it is compared with.

Each sees what its metrics would tell it. All of them stand behind one autoscaler (`elastic.py`), which looks every 15 s
and goes down only after 300 s of wishing to, as Kubernetes' does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from katydid_gateway.scaling.planner import Planner, ScalingTerms
from katydid_gateway.scaling.signals import RoleLoad

__all__ = ["RULES", "Rule", "Seen"]


@dataclass(frozen=True, slots=True)
class Seen:
    """What can be measured: the load as the gateway sees it; `asked` counts engines that are ready or start."""

    load: RoleLoad
    asked: int
    gpu_memory: float


class Rule(Protocol):
    """Says how many engines it wants; the autoscaler bounds it."""

    def __call__(self, seen: Seen, now: float, /) -> int: ...


class Plan:
    """The gateway's `desired_replicas`."""

    def __init__(self, terms: ScalingTerms) -> None:
        self._planner = Planner(terms)

    def __call__(self, seen: Seen, now: float) -> int:
        return self._planner.observe(seen.load, now).desired


class QueueLength:
    """KEDA's usual trigger: one engine for every `target` requests that wait."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, seen: Seen, _now: float) -> int:
        return math.ceil(seen.load.waiting / self._target)


class QueueOrCache:
    """llm-d's saturation as a ratio of the present: the larger of waiting / 5 an engine and KV in use / 0.8."""

    def __call__(self, seen: Seen, _now: float) -> int:
        load = seen.load
        ratio = max(load.waiting / max(1, load.ready) / 5, load.cache_pressure / 0.8)
        # Kubernetes' tolerance: a tenth off the target is on it.
        return seen.asked if abs(ratio - 1) <= 0.1 else math.ceil(load.ready * ratio)


class Concurrency:
    """Knative's: one engine for every `target` requests in flight."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, seen: Seen, _now: float) -> int:
        return math.ceil((seen.load.running + seen.load.waiting) / self._target)


class SampleRule:
    """A published sample for serving models: an engine more while a queue is long, one less while GPU memory is more
    than 90 % used. `memory_step` of 1 reads the second half as it was perhaps meant."""

    def __init__(self, memory_step: int) -> None:
        self._memory_step = memory_step

    def __call__(self, seen: Seen, _now: float) -> int:
        if seen.load.waiting > 10:
            return seen.asked + 1
        return seen.asked + (self._memory_step if seen.gpu_memory > 0.9 else 0)


class Fixed:
    """No scaling."""

    def __init__(self, engines: int) -> None:
        self._engines = engines

    def __call__(self, _seen: Seen, _now: float) -> int:
        return self._engines


RULES: Mapping[str, Callable[[float], Rule]] = {
    "plan": lambda start_s: Plan(ScalingTerms(start_s=start_s)),
    "sample as written": lambda _: SampleRule(-1),
    "sample as meant": lambda _: SampleRule(+1),
    "queue length 5": lambda _: QueueLength(5),
    "queue length 1": lambda _: QueueLength(1),
    "queue or KV use": lambda _: QueueOrCache(),
    "in flight 8": lambda _: Concurrency(8),
    "in flight 12": lambda _: Concurrency(12),
    "in flight 16": lambda _: Concurrency(16),
    "in flight 24": lambda _: Concurrency(24),
    "fixed 4": lambda _: Fixed(4),
    "fixed 6": lambda _: Fixed(6),
    "fixed 8": lambda _: Fixed(8),
    "fixed 12": lambda _: Fixed(12),
}
"""By name; each is made with the seconds an engine takes to start."""
