"""A day of agents at work: sessions that come as people do, few at night, most after lunch, and in sudden crowds."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

from katydid_cli.simulation.trace import Agents, Arrival

__all__ = ["DAY_S", "day_of_agents", "share_of_peak"]

DAY_S = 86_400.0

# Height of the day at full hours; between them it is a cosine.
_HOURS = (
    *(0.16, 0.13, 0.11, 0.10, 0.10, 0.12, 0.18, 0.30),
    *(0.52, 0.78, 0.92, 0.95, 0.80, 0.84, 0.98, 1.00),
    *(0.96, 0.86, 0.66, 0.50, 0.42, 0.34, 0.27, 0.21),
)
# Crowds: begin (h), minutes, how much more of the peak.
_CROWDS = ((2.5, 20, 0.25), (9.25, 15, 0.35), (11.0, 30, 0.25), (16.5, 10, 0.5), (20.0, 40, 0.35))


def share_of_peak(at: float) -> float:
    """How busy the day is `at` seconds after midnight, as a share of its peak without crowds."""
    hour = at / 3600 % 24
    low, high = _HOURS[int(hour)], _HOURS[(int(hour) + 1) % 24]
    share = low + (high - low) * (1 - math.cos(math.pi * (hour % 1))) / 2
    return share + sum(more for begin, minutes, more in _CROWDS if begin <= hour < begin + minutes / 60)


def day_of_agents(*, peak_sessions_per_s: float, seed: int, grain: int = 8, hours: float = 24.0) -> Iterator[Arrival]:
    """Arrivals in order, made as they are asked for: a day has more of them than memory should hold.

    Sessions are a Poisson process whose rate follows the day (Lewis and Shedler, 1979: thinning). `grain` is that of
    `Agents`: engines that are as much slower and smaller are as busy, at a fraction of the work to simulate.
    """
    agents = Agents(seed, grain=grain)
    most = 1.0 + max(more for _, _, more in _CROWDS)
    number = itertools.count()
    waiting: list[tuple[float, int, Arrival]] = []
    at = 0.0
    while at < hours * 3600:
        at += agents.dice.expovariate(peak_sessions_per_s * most)
        while waiting and waiting[0][0] <= at:
            yield heapq.heappop(waiting)[2]
        if agents.dice.random() * most < share_of_peak(at):
            for arrival in agents.session(at):
                heapq.heappush(waiting, (arrival.at, next(number), arrival))
    while waiting:
        yield heapq.heappop(waiting)[2]
