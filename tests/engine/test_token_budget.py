"""Prompts beside decodes: these keep their pace as soon as a few steps were measured, and the prompt still ends."""

from __future__ import annotations

import itertools
import random
from array import array
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.block_pool import BlockPool
from katydid_engine.plan import Run, StepOutput, StepPlan
from katydid_engine.request import Request, Sampling
from katydid_engine.scheduler import Scheduler, SchedulerConfig
from katydid_engine.token_budget import TokenBudget, deal_chunks
from katydid_runtime.block_hash import ChainKey


@given(st.lists(st.integers(1, 1000), max_size=6), st.integers(0, 2000))
def test_chunks(wanted: list[int], budget: int) -> None:
    chunks = deal_chunks(wanted, budget)
    assert all(0 <= chunk <= want for chunk, want in zip(chunks, wanted, strict=True))
    assert sum(chunks) == min(budget, sum(wanted)), "nothing is left over that somebody wants"
    if len(wanted) > 1 and budget >= 2:
        assert chunks[1] > 0, "the second always moves"


def step(tokens: int, context: int = 0) -> StepPlan:
    """Of a prompt's tokens beside a decode."""
    decode = Run(1, 5, array("I", [1]), 0, array("I"))
    return StepPlan(1, runs=(decode, Run(2, context, array("I", [1]) * tokens, 0, array("I"))), num_decodes=1)


def linear(budget: TokenBudget, first: float, token: float) -> None:
    """Steps behind nothing that take so long, of prepared sizes and larger ones."""
    for tokens in (100, 300, 900, 1200, 3000) * 20:
        budget.took(step(tokens), first + token * tokens)


def test_what_fits_the_time_goes_to_the_prompt() -> None:
    budget = TokenBudget(0.05, 64)
    assert budget.prompt_tokens(0.05) == 64, "nothing is measured yet"
    linear(budget, 0.01, 1e-4)
    assert budget.prompt_tokens(0.05) == pytest.approx(400, rel=0.02)
    assert budget.prompt_tokens(0.1) == pytest.approx(900, rel=0.02)
    assert budget.prompt_tokens(0.012) == 64, "too little time: it moves all the same"
    linear(budget, 2.0, 1e-4)
    assert budget.prompt_tokens(0.05) == 64


def test_prepared_sizes() -> None:
    budget = TokenBudget(0.05, 64, (256, 1024))
    assert budget.prompt_tokens(0.05) == 256
    linear(budget, 0.01, 1e-5)
    for seconds, tokens in ((0.001, 256), (0.015, 256), (0.025, 1024), (0.03, 1024), (0.05, 4000)):
        assert budget.prompt_tokens(seconds) == pytest.approx(tokens, rel=0.02)


def test_a_size_that_seems_all_there_is_time_for_is_not_the_last_word() -> None:
    """Where a step takes long whatever is in it, one size alone would say that a token does."""
    budget = TokenBudget(0.05, 64, (256, 512, 1024))
    chosen = []
    for _ in range(6):
        chosen.append(budget.prompt_tokens(0.045))
        budget.took(step(chosen[-1]), 0.03 + 1e-5 * chosen[-1])
    assert chosen[:2] == [256, 512]
    assert chosen[-1] == 1024
    slow = TokenBudget(0.05, 64, (256, 512, 1024))
    chosen = []
    for _ in range(6):
        chosen.append(slow.prompt_tokens(0.045))
        slow.took(step(chosen[-1]), 1e-3 + 1.6e-4 * chosen[-1])
    assert chosen == [256, 512, 256, 256, 256, 256], "once is enough"


def test_sizes_whose_newest_steps_were_too_long_are_left() -> None:
    """Sizes take up to 8 % more or less than any line through them says, while 40 prompts of 60,000 tokens grow."""
    sizes, late, count = (256, 512, 1024, 1536, 2048), 0, 0
    for seed in range(40):
        chance, context, budget = random.Random(seed), 0, TokenBudget(0.05, 64, sizes)
        share = {size: chance.uniform(0.92, 1.08) for size in sizes}
        while context < 60_000:
            tokens = budget.prompt_tokens(0.05, context)
            seconds = share[tokens] * (0.012 + 1.2e-5 * tokens + 6e-10 * tokens * (context + tokens / 2))
            seconds *= chance.uniform(0.998, 1.002)
            budget.took(step(tokens, context), seconds)
            context, count, late = context + tokens, count + 1, late + (seconds > 0.0505)
    assert late < 0.003 * count, "and it was 0.009 by the line alone"


def test_steps_that_the_host_holds_up_say_nothing_of_what_their_pairs_cost() -> None:
    budget = TokenBudget(0.05, 64, (256, 1024))
    for context in (0, 2000, 4000, 8000) * 20:
        for tokens in (256, 1024):
            budget.took(step(tokens, context), 0.01 + 1e-5 * tokens + 1e-9 * tokens * context)
        budget.took(step(4096, context), 0.2)  # launched op by op: the same however much stands behind
    assert budget.step_s(4096, 0) == pytest.approx(0.2, rel=0.1)
    assert budget.step_s(4096, 1_000_000) == pytest.approx(4.1, rel=0.1)
    assert budget.prompt_tokens(0.25, 0) > 2048
    assert budget.prompt_tokens(0.25, 1_000_000) == 256, "the others seem to fit, and would not"
    assert budget.prompt_s(131_072, 1_000_000, 0.25) > 130


def test_how_long_a_prompt_takes() -> None:
    budget = TokenBudget(0.05, 64, (100, 300))
    linear(budget, 0.01, 1e-4)
    assert budget.prompt_s(900, 0, 0.041) == pytest.approx(3 * 0.01 + 0.09, rel=0.02)
    assert budget.prompt_s(900, 0, 0.02) == pytest.approx(9 * 0.01 + 0.09, rel=0.02)
    assert budget.prompt_s(20, 0, 0.02) == pytest.approx(0.012, rel=0.02), "one step at least"


def test_sparse_prompts_have_costs_and_sizes_of_their_own() -> None:
    by_op, prepared = TokenBudget(0.05, 64, (100, 300)), TokenBudget(0.05, 64, (), (512, 1024))
    for budget in (by_op, prepared):
        for tokens in (400, 900, 1600) * 20:
            plan = step(tokens)
            plan = replace(plan, sparse=True, sparse_pairs=plan.num_prefill_pairs)
            budget.took(plan, 0.4 + 1e-4 * tokens)
    assert by_op.prompt_tokens(0.05, sparse=True) == pytest.approx(4000, rel=0.02), "as long as their least step again"
    assert by_op.prompt_tokens(1.2, sparse=True) == pytest.approx(8000, rel=0.02)
    assert by_op.prompt_tokens(0.05) == 100, "nothing is known of the others"
    assert prepared.prompt_tokens(0.05, sparse=True) == 512
    assert prepared.prompt_tokens(0.05) == 64


def test_what_stands_before_a_prompt_counts_until_its_middle() -> None:
    budget = TokenBudget(0.05, 64)
    for tokens, context in itertools.product((100, 400, 1600), (0, 4000, 16_000)):
        for _ in range(5):
            budget.took(step(tokens, context), 0.01 + 1e-8 * tokens * (context + (tokens + 1) / 2))
    chunk = budget.prompt_tokens(0.05, 10_000 + 4000)
    assert chunk == pytest.approx(0.04 / (1e-8 * 14_000), rel=0.05)
    steps, pairs = 8000 / chunk, 8000 * (10_000 + 8001 / 2)
    assert budget.prompt_s(8000, 10_000, 0.05) == pytest.approx(0.01 * steps + 1e-8 * pairs, rel=0.05)


@pytest.mark.parametrize("ttft_s", [None, 4.0])
@pytest.mark.parametrize("sizes", [(), (64, 128, 256, 1024)])
@pytest.mark.parametrize("ahead", [False, True])
def test_running_streams_keep_their_pace_while_a_long_prompt_comes(
    ahead: bool, sizes: tuple[int, ...], ttft_s: float | None
) -> None:
    """Steps that cost 5 ms, 0.1 ms a token and more with context; 8 streams, then a prompt of 128,000 tokens and, in
    the middle of it, a short one."""
    now, handles = 0.0, itertools.count(1)
    config = SchedulerConfig(max_model_tokens=131_072, max_batch_tokens=8192, max_sequences=16)
    scheduler = Scheduler(
        config, BlockPool(2300), lambda: now, budget=TokenBudget(0.05, 64, sizes), ttft_target_s=ttft_s
    )

    def submit(length: int, **sampling: int) -> int:
        request = Request(next(handles), array("I", [7] * length), ChainKey(b"m" * 32), Sampling(**sampling))
        scheduler.add(replace(request, bypass_cache=True, received_at=now))
        return request.handle

    for index in range(8):
        submit(10, max_tokens=100_000, seed=index)
    long = short = 0
    submitted: dict[int, float] = {}
    ended: dict[int, float] = {}
    gaps: list[float] = []
    in_flight: deque[StepPlan] = deque()
    while long not in ended:
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
        if len(in_flight) > (ahead and plan is not None):
            done = in_flight.popleft()
            tokens = sum(len(run.tokens) for run in done.runs)
            seconds = 0.005 + tokens * (1e-4 + max(run.start for run in done.runs) * 2e-9)
            now += seconds
            gaps.append(seconds)
            scheduler.commit(done, StepOutput((array("I", (1,)),) * len(done.samples), (0,) * len(done.samples)))
            scheduler.took(done, seconds)
        for end in scheduler.take_outcome().ends:
            ended[end.handle] = now
        if not long and len(gaps) == 20:
            long = submit(128_000, max_tokens=1)
            submitted[long] = now
        if long and not short and now > submitted[long] + 5:
            short = submit(200, max_tokens=1)
            submitted[short] = now
    assert ended[short] - submitted[short] < 0.5, "the short one is not starved"
    gaps = sorted(gaps[21:])
    assert gaps[len(gaps) * 99 // 100] <= 0.052
    work = 128_000 * (1e-4 + 64_000 * 2e-9)
    assert ended[long] - submitted[long] < 1.35 * work, "and the long one gets what the streams leave"


def test_larger_steps_without_decodes_are_prepared_where_there_are_any() -> None:
    plain, larger = (TokenBudget(0.05, 64, (256, 1024), alone_sizes=sizes) for sizes in ((), (2048, 4096)))
    for budget in (plain, larger):
        for tokens in (256, 1024, 4096, 6000) * 20:
            beside = step(tokens)
            budget.took(replace(beside, runs=beside.runs[1:], num_decodes=0), 1e-5 * tokens)
            budget.took(beside, 0.2 + 1e-5 * tokens)
        assert budget.step_s(4096, 0) == pytest.approx(0.241, rel=0.15)
    assert plain.step_s(4096, 0, beside=False) > 0.1, "of all that are launched op by op"
    assert larger.step_s(4096, 0, beside=False) == pytest.approx(0.041, rel=0.05)
