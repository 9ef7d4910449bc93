"""Prompts beside rows that decode: as many as can are in time, no row falls behind its target for it, and all end."""

from __future__ import annotations

import itertools
import random
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_engine.block_pool import BlockPool
from katydid_engine.plan import Run, StepOutput, StepPlan
from katydid_engine.request import Request, Sampling
from katydid_engine.scheduler import Scheduler, SchedulerConfig
from katydid_engine.token_budget import TokenBudget
from katydid_runtime.block_hash import ChainKey

TTFT_S, TPOT_S = 0.4, 0.005


def seconds(plan: StepPlan) -> float:
    """A tenth of what a large model takes."""
    prompts = plan.num_prefill_tokens
    return 1e-3 + 1e-5 * plan.num_decodes + 1e-5 * prompts + 5e-10 * plan.num_prefill_pairs


class Replayed:
    """Requests by their handles, and when their tokens came."""

    def __init__(self, ttft_s: float | None, sizes: tuple[int, ...] = (64, 128, 256, 1024)) -> None:
        self.now = 0.0
        config = SchedulerConfig(max_model_tokens=40_000, max_batch_tokens=2048, max_sequences=32)
        budget = TokenBudget(TPOT_S, 64, sizes)
        self.scheduler = Scheduler(config, BlockPool(6000), lambda: self.now, budget=budget, ttft_target_s=ttft_s)
        self.asked: dict[int, float] = {}
        self.times: dict[int, list[float]] = {}
        self.steps: list[float] = []
        self._handles = itertools.count(1)
        for length, context in ((250, 0), (60, 0), (900, 9000), (60, 9000), (2000, 0), (1500, 9000)) * 8:
            # What steps take is known.
            decode = Run(1, 5, array("I", [1]), 0, array("I"))
            prompt = Run(2, context, array("I", [1]) * length, 0, array("I"))
            plan = StepPlan(1, runs=(decode, prompt), num_decodes=1)
            budget.took(plan, seconds(plan))

    def ask(self, prompt: int, output: int, priority: int = 0) -> int:
        handle = next(self._handles)
        sampling = Sampling(max_tokens=output, ignore_eos=True)
        tokens, key = array("I", [7] * prompt), ChainKey(b"m" * 32)
        self.asked[handle], self.times[handle] = self.now, []
        self.scheduler.add(
            Request(handle, tokens, key, sampling, priority=priority, received_at=self.now, bypass_cache=True)
        )
        return handle

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.steps.append(seconds(plan))
        self.now += self.steps[-1]
        rows = len(plan.samples)
        self.scheduler.commit(plan, StepOutput((array("I", (1,)),) * rows, (0,) * rows))
        self.scheduler.took(plan, self.steps[-1])
        for chunk in self.scheduler.take_outcome().tokens:
            self.times[chunk.handle] += [self.now] * len(chunk.tokens)
        return True

    def in_time(self) -> int:
        return sum(bool(times) and times[0] - self.asked[handle] <= TTFT_S for handle, times in self.times.items())


def attained(ttft_s: float | None, seed: int) -> tuple[int, Replayed]:
    """Requests that are in time of a crowd that is more than can be."""
    chance, replayed = random.Random(seed), Replayed(ttft_s)
    coming = sorted((chance.uniform(0, 2), chance.choice([100, 800, 3000, 9000, 20_000])) for _ in range(30))
    while coming or replayed.scheduler.num_requests:
        while coming and coming[0][0] <= replayed.now:
            replayed.ask(coming.pop(0)[1], chance.choice([1, 30, 200]))
        if not replayed.step():
            replayed.now += 1e-3
    return replayed.in_time(), replayed


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000))
def test_no_row_falls_behind_its_target_and_all_end(seed: int) -> None:
    _, replayed = attained(TTFT_S, seed)
    for times in replayed.times.values():
        assert times, "it came to its end"
        # A row is lent the time of 40 tokens, and has it back when it has gone on for a while.
        assert all(time - times[0] <= 1.05 * TPOT_S * (number + 40) for number, time in enumerate(times))


def test_more_are_in_time_than_in_order() -> None:
    assert sum(attained(TTFT_S, seed)[0] for seed in range(3)) > 1.15 * sum(
        attained(None, seed)[0] for seed in range(3)
    )


def test_a_prompt_that_cannot_be_in_time_disturbs_nobody() -> None:
    replayed = Replayed(TTFT_S)
    for _ in range(8):
        replayed.ask(100, 2000)
    while min(len(times) for times in replayed.times.values()) < 100:
        replayed.step()
    before = len(replayed.steps)
    long = replayed.ask(39_000, 1)
    while not replayed.times[long]:
        replayed.step()
    assert max(replayed.steps[before:]) <= TPOT_S
    before = len(replayed.steps)
    saved = replayed.ask(22_000, 1)
    while not replayed.times[saved]:
        replayed.step()
    assert replayed.times[saved][0] - replayed.asked[saved] <= TTFT_S
    assert max(replayed.steps[before:]) > TPOT_S, "one that can be is helped"


def test_priority_comes_first_but_the_others_move() -> None:
    replayed = Replayed(TTFT_S)
    replayed.ask(10, 3000)
    slow, fast = replayed.ask(15_000, 1), replayed.ask(20_000, 1, priority=1)
    while not (replayed.times[slow] and replayed.times[fast]):
        replayed.step()
    assert replayed.times[fast] < replayed.times[slow]
    low = replayed.ask(300, 1)
    while not replayed.times[low]:
        if replayed.scheduler.num_requests < 3:
            replayed.ask(20_000, 1, priority=1)
        replayed.step()
