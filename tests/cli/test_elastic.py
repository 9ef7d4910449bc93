"""The simulator's fleet that grows and shrinks: sums done by hand, the rules, a day that is the same every time."""

from __future__ import annotations

import itertools

import pytest
from katydid_cli.simulation.autoscalers import RULES, Seen
from katydid_cli.simulation.day import day_of_agents, share_of_peak
from katydid_cli.simulation.elastic import LOOK_S, STABLE_S, ElasticOptions, replay_elastic
from katydid_cli.simulation.engine_model import EngineSpeeds
from katydid_cli.simulation.trace import Arrival
from katydid_gateway.scaling.signals import RoleLoad

SPEEDS = EngineSpeeds(prefill_tokens_per_s=1000, step_s=0.01, step_per_request_s=0.0, budget_tokens=256)
OPTIONS = ElasticOptions(SPEEDS, start_s=60.0, gpus=1, most=3)


def arrivals(seconds: float, every_s: float = 5.0, tokens: int = 64, output: int = 2) -> list[Arrival]:
    count = int(seconds / every_s)
    return [Arrival(number * every_s, (f"{number}".encode(),), tokens, output) for number in range(count)]


class Wish:
    """Wants what a script says: (from this time on, engines)."""

    def __init__(self, *script: tuple[float, int]) -> None:
        self._script = script
        self.seen: list[Seen] = []

    def __call__(self, seen: Seen, now: float, /) -> int:
        self.seen.append(seen)
        return [engines for since, engines in self._script if since <= now][-1]


def test_engines_are_paid_from_the_wish_and_work_once_they_have_started() -> None:
    wish = Wish((0, 1), (300, 3))
    outcome = replay_elastic("wish", wish, arrivals(1200), OPTIONS)
    last = 1195.0
    assert outcome.gpu_hours * 3600 == pytest.approx(last + 2 * (last - 300), abs=1)
    ready = [seen.load.ready for seen in wish.seen]
    assert ready.index(3) == (300 + OPTIONS.start_s) / LOOK_S
    assert [seen.asked for seen in wish.seen][21:24] == [3, 3, 3]
    assert (outcome.most_engines, outcome.changes, outcome.requests) == (3, 1, 240)


def test_down_comes_after_the_stable_time_and_the_drain() -> None:
    long = Arrival(610.0, (b"long",), 64, 10_000)
    wish = Wish((0, 2), (600, 1))
    outcome = replay_elastic("wish", wish, sorted([*arrivals(1200), long], key=lambda a: a.at), OPTIONS)
    down = next(place for place, seen in enumerate(wish.seen) if seen.asked == 1 and place > 2) * LOOK_S
    assert down == pytest.approx(600 + STABLE_S + LOOK_S, abs=LOOK_S)
    assert outcome.requests == 241, "what an engine had when it was taken away was answered"


def test_the_bounds_hold() -> None:
    assert replay_elastic("wish", Wish((0, 99)), arrivals(300), OPTIONS).most_engines == OPTIONS.most
    assert replay_elastic("wish", Wish((0, 0)), arrivals(300), OPTIONS).most_engines == OPTIONS.least


def test_attainment_is_what_requests_felt() -> None:
    """Prompts of 2000 tokens take two seconds and 80 ms of steps; three at once end after 2, 4 and 6 seconds."""
    options = ElasticOptions(SPEEDS, ttft_s=4.5, tpot_s=0.05)
    burst = [Arrival(0.001 * n, (f"{n}".encode(),), 2000, 3) for n in range(3)]
    outcome = replay_elastic("fixed", RULES["fixed 4"](0.0), [*burst, Arrival(60.0, (b"x",), 64, 2)], options)
    assert outcome.within_ttft == 3 / 4
    assert outcome.p99_ttft_s == pytest.approx(6.24, abs=0.05)
    assert outcome.within_tpot < 1, "those that decode between others' chunks are slow"


@pytest.mark.parametrize(
    ("rule", "load", "gpu_memory", "wanted"),
    [
        ("sample as written", RoleLoad(4, waiting=11), 0.93, 5),
        ("sample as written", RoleLoad(4, waiting=10), 0.93, 3),
        ("sample as written", RoleLoad(4, waiting=10), 0.89, 4),
        ("sample as meant", RoleLoad(4, waiting=0), 0.93, 5),
        ("queue length 5", RoleLoad(4, waiting=11), 0.93, 3),
        ("queue or KV use", RoleLoad(4, held_pages=96, total_pages=100), 0.93, 5),
        ("queue or KV use", RoleLoad(4, held_pages=84, total_pages=100), 0.93, 4),
        ("in flight 8", RoleLoad(4, running=30, waiting=3), 0.93, 5),
        ("fixed 6", RoleLoad(4), 0.93, 6),
    ],
)
def test_rules(rule: str, load: RoleLoad, gpu_memory: float, wanted: int) -> None:
    assert RULES[rule](240.0)(Seen(load, 4, gpu_memory), 0.0) == wanted


def test_a_day_is_the_same_every_time_in_order_and_busiest_in_the_afternoon() -> None:
    once, twice = (list(day_of_agents(peak_sessions_per_s=0.05, seed=3, grain=16, hours=24)) for _ in range(2))
    assert once == twice
    assert all(a.at <= b.at for a, b in itertools.pairwise(once))
    by_hour = [sum(hour <= arrival.at / 3600 < hour + 1 for arrival in once) for hour in range(24)]
    assert max(by_hour[13:18]) > 4 * by_hour[4]
    assert share_of_peak(15 * 3600) == 1.0
    assert share_of_peak(16.55 * 3600) > 1.3, "a crowd"


def test_grain_makes_prompts_shorter_and_nothing_else() -> None:
    fine, coarse = (list(day_of_agents(peak_sessions_per_s=0.2, seed=3, grain=grain, hours=2)) for grain in (1, 16))
    mean = [sum(arrival.prompt_tokens for arrival in each) / len(each) for each in (fine, coarse)]
    assert mean[0] / mean[1] == pytest.approx(16, rel=0.25)


def test_the_plan_sees_a_rising_load_before_a_queue_does() -> None:
    """One prompt of two seconds every 16 s at first, every 2 s after half an hour."""
    gaps = [16 - 14 * min(1.0, number / 200) for number in range(500)]
    times = list(itertools.accumulate(gaps))
    rising = [Arrival(at, (f"{number}".encode(),), 2000, 20) for number, at in enumerate(times)]
    options = ElasticOptions(SPEEDS, start_s=120.0, most=6)
    plan, queue = (
        replay_elastic(rule, RULES[rule](options.start_s), rising, options) for rule in ("plan", "queue length 5")
    )
    assert plan.within_ttft > 0.9
    assert queue.within_ttft < 0.8
    assert plan.most_engines <= options.most
