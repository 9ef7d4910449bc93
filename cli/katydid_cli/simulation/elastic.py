"""Replays arrivals over a fleet that grows and shrinks: engines take their time to start and finish what they have.

What the autoscaler does is what Kubernetes does: it looks every 15 s, takes the newest engines away first, and goes
down only to the most it wanted in the last 300 s. GPUs are paid from the moment an engine is asked for until its last
request has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from katydid_gateway.scaling.signals import role_loads

from katydid_cli.simulation.autoscalers import Rule, Seen
from katydid_cli.simulation.engine_model import EngineModel, EngineSpeeds, Job
from katydid_cli.simulation.policies import KatydidRouter
from katydid_cli.simulation.trace import Arrival

__all__ = ["ElasticOptions", "ElasticOutcome", "replay_elastic"]

REPORT_S = 0.5
LOOK_S = 15.0
STABLE_S = 300.0


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """Bounds of the fleet, what an engine takes to start, what its GPUs are; targets in seconds."""

    speeds: EngineSpeeds
    least: int = 1
    most: int = 12
    start_s: float = 240.0
    gpus: int = 8
    gpu_memory: float = 0.93
    ttft_s: float = 4.0
    tpot_s: float = 0.05


@dataclass(frozen=True, slots=True)
class ElasticOutcome:
    """What a rule made of the day; shares in [0, 1]. `engines` are those paid for, in the mean and at most."""

    rule: str
    requests: int
    within_ttft: float
    within_tpot: float
    within_both: float
    p50_ttft_s: float
    p99_ttft_s: float
    gpu_hours: float
    engines: float
    most_engines: int
    changes: int


@dataclass(slots=True)
class _Member:
    engine: EngineModel
    asked_at: float
    ready_at: float
    up: bool = False
    draining: bool = False


class _Fleet:
    """The engines that are paid for, in the order they were asked for."""

    def __init__(self, options: ElasticOptions) -> None:
        self._options = options
        self._made = 0
        self.router = KatydidRouter([])
        self.members: list[_Member] = []
        self.paid_s = 0.0
        self.changes = 0

    @property
    def asked(self) -> list[_Member]:
        return [member for member in self.members if not member.draining]

    def resize(self, wanted: int, now: float, start_s: float) -> None:
        asked = self.asked
        self.changes += wanted != len(asked)
        for _ in range(wanted - len(asked)):
            engine = EngineModel(f"engine-{self._made}", self._options.speeds, on_blocks=self.router.blocks)
            engine.now = now
            self._made += 1
            self.members.append(_Member(engine, now, now + start_s))
        for member in asked[wanted:]:
            member.draining = True
            if member.up:
                self.router.drain(member.engine.name)

    def advance(self, now: float) -> None:
        """Work up to now; who has started is up, who has drained is gone."""
        for member in self.members:
            if member.up:
                member.engine.advance(now)
            elif not member.draining and member.ready_at <= now:
                member.up = True
                member.engine.now = now
                self.router.add(member.engine)
        done = [each for each in self.members if each.draining and not (each.engine.requests or each.engine.begun)]
        for member in done:
            if member.up:
                self.router.remove(member.engine.name)
            self.dismiss(member, max(now, member.engine.now))

    def dismiss(self, member: _Member, now: float) -> None:
        self.paid_s += now - member.asked_at
        self.members.remove(member)

    def seen(self) -> Seen:
        router = self.router.router
        load = role_loads(router.engines.values(), router.sent_tokens, 0)["both"]
        return Seen(load, len(self.asked), self._options.gpu_memory if load.ready else 0.0)


class _Wishes:
    """The autoscaler's memory: up at once, down to the largest wish of the last 300 s."""

    def __init__(self) -> None:
        self._wishes: deque[tuple[float, int]] = deque()

    def settle(self, wanted: int, asked: int, now: float) -> int:
        self._wishes.append((now, wanted))
        while self._wishes[0][0] < now - STABLE_S:
            self._wishes.popleft()
        return max(wanted, min(asked, max(wish for _, wish in self._wishes)))


def replay_elastic(name: str, rule: Rule, arrivals: Iterable[Arrival], options: ElasticOptions) -> ElasticOutcome:
    """Run arrivals to their end, beginning with the least number of engines, up."""
    fleet, wishes = _Fleet(options), _Wishes()
    tally = _Tally(options)
    most, now, next_report, next_look = options.least, 0.0, 0.0, 0.0
    fleet.resize(options.least, 0.0, 0.0)
    fleet.changes = 0
    for arrival in arrivals:
        while next_report <= arrival.at:
            now = next_report
            next_report += REPORT_S
            fleet.advance(now)
            tally.hear(fleet)
            fleet.router.report(now)
            if now >= next_look:
                next_look += LOOK_S
                seen = fleet.seen()
                wanted = min(options.most, max(options.least, rule(seen, now)))
                fleet.resize(wishes.settle(wanted, seen.asked, now), now, options.start_s)
                most = max(most, len(fleet.members))
        fleet.advance(arrival.at)
        tally.hear(fleet)
        chosen = fleet.router.choose(arrival, arrival.at)
        next(member for member in fleet.members if member.engine.name == chosen).engine.submit(Job(arrival))
    for member in fleet.members:
        member.engine.drain()
    tally.hear(fleet)
    for member in list(fleet.members):
        fleet.dismiss(member, max(now, member.engine.now) if member.draining else now)
    return tally.outcome(name, fleet, most, now)


class _Tally:
    """What became of requests; one that has ended leaves its times and not its prompt."""

    def __init__(self, options: ElasticOptions) -> None:
        self._open: list[Job] = []
        self._options = options
        self._ttfts: list[float] = []
        self._early = self._fluent = self._both = 0

    def hear(self, fleet: _Fleet) -> None:
        """Tell the router of first tokens that have come, and count the requests that have ended."""
        for member in fleet.members:
            begun, member.engine.begun = member.engine.begun, []
            for job in begun:
                fleet.router.first_token(job.arrival, member.engine.name)
            self._open += begun
        ended = [job for job in self._open if job.ended_at is not None]
        if not ended:
            return
        self._open = [job for job in self._open if job.ended_at is None]
        for job in ended:
            ttft = (job.first_token_at or 0.0) - job.arrival.at
            early, fluent = ttft <= self._options.ttft_s, _tpot(job) <= self._options.tpot_s
            self._ttfts.append(ttft)
            self._early += early
            self._fluent += fluent
            self._both += early and fluent

    def outcome(self, name: str, fleet: _Fleet, most: int, length_s: float) -> ElasticOutcome:
        requests, ordered = len(self._ttfts), sorted(self._ttfts)
        return ElasticOutcome(
            rule=name,
            requests=requests,
            within_ttft=self._early / requests,
            within_tpot=self._fluent / requests,
            within_both=self._both / requests,
            p50_ttft_s=ordered[requests // 2],
            p99_ttft_s=ordered[int(requests * 0.99)],
            gpu_hours=fleet.paid_s * self._options.gpus / 3600,
            engines=fleet.paid_s / length_s,
            most_engines=most,
            changes=fleet.changes,
        )


def _tpot(job: Job) -> float:
    tokens = job.arrival.output_tokens
    return ((job.ended_at or 0.0) - (job.first_token_at or 0.0)) / (tokens - 1) if tokens > 1 else 0.0
