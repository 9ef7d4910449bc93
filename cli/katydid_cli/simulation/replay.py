"""Replays arrivals over simulated engines under one policy, and says what its callers would have felt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from katydid_cli.simulation.engine_model import EngineModel, EngineSpeeds, Job
from katydid_cli.simulation.policies import POLICIES, Policy
from katydid_cli.simulation.trace import Arrival

__all__ = ["Outcome", "replay"]

# Engines tell their load with every step; a gateway sees it about so often.
REPORT_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy made of a trace; times in seconds, shares in [0, 1]."""

    policy: str
    requests: int
    mean_ttft_s: float
    p50_ttft_s: float
    p99_ttft_s: float
    within_slo: float
    hit_rate: float
    busy: float
    most_over_mean: float


def replay(
    policy: str, arrivals: Sequence[Arrival], engines: int, speeds: EngineSpeeds, *, ttft_slo_s: float = 4.0
) -> Outcome:
    """Run the trace to its end. `most_over_mean` is the fullest engine's prompt tokens over the mean."""
    chooser: list[Policy] = []
    infinite = bool(getattr(POLICIES[policy], "infinite_cache", False))
    models = [
        EngineModel(
            f"engine-{number}",
            speeds,
            infinite_cache=infinite,
            on_blocks=lambda name, stored, removed: chooser[0].blocks(name, stored, removed),
        )
        for number in range(engines)
    ]
    by_name = {model.name: model for model in models}
    chooser.append(POLICIES[policy](models))
    jobs: list[Job] = []
    sent_tokens = dict.fromkeys(by_name, 0)
    ears = _Ears(chooser[0])
    next_report = 0.0
    for arrival in arrivals:
        while next_report <= arrival.at:
            for model in models:
                model.advance(next_report)
            ears.tell(next_report)
            chooser[0].report(next_report)
            # Nothing changes while nobody works: the next report of interest is that of the arrival.
            next_report = next_report + REPORT_INTERVAL_S if ears.waiting else math.nextafter(arrival.at, math.inf)
        for model in models:
            model.advance(arrival.at)
        ears.tell(arrival.at)
        name = chooser[0].choose(arrival, arrival.at)
        job = Job(arrival)
        by_name[name].submit(job)
        sent_tokens[name] += arrival.prompt_tokens
        jobs.append(job)
        ears.silent.append((job, name))
    for model in models:
        model.drain()
    return _outcome(policy, jobs, models, list(sent_tokens.values()), ttft_slo_s)


class _Ears:
    """Tells a policy of first tokens and ends once they have come."""

    def __init__(self, policy: Policy) -> None:
        self.silent: list[tuple[Job, str]] = []
        self._running: list[tuple[Job, str]] = []
        self._policy = policy

    @property
    def waiting(self) -> bool:
        """Whether there is a job it has yet to tell of."""
        return bool(self.silent or self._running)

    def tell(self, now: float) -> None:
        begun = [
            (job, name) for job, name in self.silent if job.first_token_at is not None and job.first_token_at <= now
        ]
        if begun:
            self.silent = [(job, name) for job, name in self.silent if (job.first_token_at or now + 1) > now]
        for job, name in begun:
            self._policy.first_token(job.arrival, name)
        self._running += begun
        ended = [name for job, name in self._running if (job.ended_at or now + 1) <= now]
        if ended:
            self._running = [(job, name) for job, name in self._running if (job.ended_at or now + 1) > now]
        for name in ended:
            self._policy.ended(name)


def _outcome(
    policy: str, jobs: list[Job], models: Sequence[EngineModel], tokens: list[int], ttft_slo_s: float
) -> Outcome:
    ttfts = sorted((job.first_token_at or 0.0) - job.arrival.at for job in jobs)
    prompt_tokens = sum(job.arrival.prompt_tokens for job in jobs)
    length_s = max(model.now for model in models) - jobs[0].arrival.at
    return Outcome(
        policy=policy,
        requests=len(jobs),
        mean_ttft_s=sum(ttfts) / len(ttfts),
        p50_ttft_s=ttfts[len(ttfts) // 2],
        p99_ttft_s=ttfts[int(len(ttfts) * 0.99)],
        within_slo=sum(ttft <= ttft_slo_s for ttft in ttfts) / len(ttfts),
        hit_rate=sum(job.cached_tokens for job in jobs) / prompt_tokens,
        busy=sum(model.busy_s for model in models) / len(models) / length_s,
        most_over_mean=max(tokens) * len(tokens) / sum(tokens),
    )
