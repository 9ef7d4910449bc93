"""Agents, step times and what a replay makes of both."""

from __future__ import annotations

import itertools
import statistics
from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.block_pool import BlockPool
from katydid_engine.plan import Run, StepPlan
from katydid_engine.rank_slice.agents import Agents, AgentTraffic
from katydid_engine.rank_slice.on_slice import OnSlice, measure_steps
from katydid_engine.rank_slice.replay import Answer, Clocks, Replay, Simulated, WallClock
from katydid_engine.rank_slice.replay_arena import ReplayArena
from katydid_engine.rank_slice.skewed_routing import SHARES, SkewedRouting, expert_shares
from katydid_engine.rank_slice.step_times import BEHIND, MeasuredSteps, StepTimes, between, fit_step_times
from katydid_engine.rank_slice.steps import SliceSteps
from katydid_engine.request import Request, Sampling
from katydid_engine.scheduler import Scheduler, SchedulerConfig
from katydid_engine.sparse_prefill import SparsePrefill
from katydid_engine.token_budget import TokenBudget
from katydid_runtime.block_hash import ChainKey

from tests.engine.rank_slice.small import small_slice

FEW = AgentTraffic(
    sessions_per_s=0.5, turns=4, prompt_mean=600, prompt_most=1500, output_mean=6, output_most=40,
    shared_tokens=128, groups=2, pause_s=0.5, vocabulary=100,
)  # fmt: skip
TIMES = StepTimes([(1, 0.004), (64, 0.008)], [(1, 0.01), (1024, 0.05)], 1e-8, 1e-8)


def replayed(times: StepTimes, until: float, pages: int = 4000) -> list[Answer]:
    clock = Simulated(times, 100)
    scheduler = Scheduler(SchedulerConfig(2048, 256, 16), BlockPool(pages), clock, budget=TokenBudget(0.05, 64))
    return Replay(scheduler, clock, clock).run(Agents(FEW).sessions(until), until)


def test_prompts_are_log_normal_and_grow_within_a_session() -> None:
    traffic = AgentTraffic(1.0)
    turns = [session._turns for session in Agents(traffic).sessions(400)]
    lengths = [turn.prompt_tokens for session in turns for turn in session]
    assert statistics.mean(lengths) == pytest.approx(68 * 1024, rel=0.06)
    assert max(lengths) == traffic.prompt_most
    assert statistics.mean(turn.output_tokens for session in turns for turn in session) == pytest.approx(900, rel=0.1)
    assert all(a.prompt_tokens <= b.prompt_tokens for session in turns for a, b in itertools.pairwise(session))
    # The same for a seed.
    assert [s.begins_at for s in Agents(traffic).sessions(9)] == [s.begins_at for s in Agents(traffic).sessions(9)]


def test_most_of_an_agents_prompt_was_seen_before() -> None:
    answers = replayed(TIMES, 60)
    done = [answer for answer in answers if answer.done]
    assert len(done) > 60
    cached = sum(answer.cached_tokens for answer in done) / sum(answer.prompt_tokens for answer in done)
    assert 0.5 < cached < 0.95
    for answer in done:
        assert len(answer.times) == answer.output_tokens
        assert answer.ttft > 0
        assert answer.times == sorted(answer.times)


def test_slower_steps_answer_later() -> None:
    slow = StepTimes([(n, 9 * s) for n, s in TIMES.decode_rows], [(n, 9 * s) for n, s in TIMES.rows], 1e-8, 1e-8)
    fast, late = (
        statistics.mean(answer.ttft for answer in replayed(times, 30) if answer.done) for times in (TIMES, slow)
    )
    assert late > 3 * fast


def test_what_waits_too_long_is_late() -> None:
    answer = Answer(asked_at=1.0, prompt_tokens=5, output_tokens=3)
    assert answer.late(5.0, 4.0)
    assert not answer.late(4.9, 4.0)
    answer.times += [2.0, 3.0, 5.0]
    assert (answer.ttft, answer.tpot) == (1.0, 1.5)
    assert not answer.late(9.0, 4.0)


@given(st.floats(1e-9, 1e-6), st.floats(1e-13, 1e-10))
def test_slopes_are_found_again(read_s: float, pair_s: float) -> None:
    rows = {1: 0.002, 16: 0.005, 64: 0.009, 2048: 0.05}
    measured = MeasuredSteps(
        {(n, context): rows[n] + read_s * n * context for n in (1, 16, 64) for context in (512, 4096)},
        {
            (n, context): rows[n] + pair_s * (n * context + n * (n + 1) // 2)
            for n in (64, 2048)
            for context in (0, 9000)
        },
    )
    found = fit_step_times(measured)
    assert found.read_s == pytest.approx(read_s, rel=1e-6)
    assert found.pair_s == pytest.approx(pair_s, rel=1e-4)
    assert [n for n, _ in found.decode_rows] == [1, 16, 64]
    assert dict(found.rows)[2048] == pytest.approx(0.05, rel=1e-6)


def test_between_points() -> None:
    points = [(1, 1.0), (4, 2.0), (16, 8.0)]
    assert between(points, 0.5) == 1.0
    assert between(points, 2) == pytest.approx(2**0.5)
    assert between(points, 16) == 8.0
    assert between(points, 32) == 16.0


def test_nothing_to_fit() -> None:
    with pytest.raises(ValueError, match="decodes: no number of rows was measured at two contexts"):
        fit_step_times(MeasuredSteps({(1, 64): 0.1}, {(64, 0): 0.1}))


def test_on_a_slice() -> None:
    """The same agents through the engine's runner."""
    steps = SliceSteps(small_slice("tp2"), 4096)
    known = measure_steps(steps, [(1, 64), (1, 128)], [(64, 0), (64, 64)], repeats=1)
    assert all(seconds > 0 for seconds in (*known.decodes.values(), *known.chunks.values()))
    clock = WallClock()
    scheduler = Scheduler(SchedulerConfig(2048, 256, 16), BlockPool(steps.pages), clock)
    agents = Agents(
        AgentTraffic(5.0, 3, 150, 200, output_mean=2, output_most=4, shared_tokens=64, pause_s=0.01, vocabulary=100)
    )
    answers = Replay(scheduler, OnSlice(steps), clock).run(agents.sessions(0.5), 30.0)
    assert answers
    assert all(answer.done and len(answer.times) == answer.output_tokens for answer in answers)
    assert any(answer.cached_tokens for answer in answers)
    scheduler.check_integrity()


def test_a_slice_goes_on_where_simulated_time_ends() -> None:
    """Requests that are open then are answered whole, and prefixes computed before are cached."""
    steps = SliceSteps(small_slice("tp2"), 8192)
    simulation = Simulated(TIMES, 100)
    clocks = Clocks(simulation)
    scheduler = Scheduler(SchedulerConfig(2048, 256, 16), BlockPool(steps.pages), clocks)
    agents = Agents(
        AgentTraffic(20.0, 3, 150, 200, output_mean=30, output_most=60, shared_tokens=64, pause_s=0.01, vocabulary=100)
    )
    replay = Replay(scheduler, simulation, clocks)
    before = replay.run(agents.sessions(0.6), 0.5)[:]
    assert sum(not answer.done for answer in before) > 1
    replay.go_on_with(OnSlice(steps))
    clocks.present = WallClock(0.5)
    answers = replay.run((), 60.0)
    assert answers[: len(before)] == before
    assert len(answers) > len(before)
    for answer in answers:
        assert answer.done
        assert len(answer.times) == answer.output_tokens
        assert answer.times == sorted(answer.times)
    assert any(answer.cached_tokens for answer in answers[len(before) :])
    scheduler.check_integrity()


def test_hits_come_from_an_arena() -> None:
    """In simulated time, then on a slice: pages forget what nobody holds, and the arena has all of it."""
    steps = SliceSteps(small_slice("tp2"), 8192, arena=True)
    arena, pool, simulation = ReplayArena(steps.object_bytes, 32), BlockPool(steps.pages), Simulated(TIMES, 100)
    clocks = Clocks(simulation)
    scheduler = Scheduler(SchedulerConfig(2048, 256, 16), pool, clocks)
    agents = Agents(
        AgentTraffic(5.0, 4, 250, 400, output_mean=8, output_most=20, shared_tokens=64, pause_s=0.01, vocabulary=100)
    )
    replay = Replay(scheduler, simulation, clocks, arena=arena, forget=pool.flush)
    before = len(replay.run(agents.sessions(1.2), 0.6))
    read, written = arena.read, arena.written
    assert read > 0
    assert written > 0
    replay.go_on_with(OnSlice(steps))
    clocks.present = WallClock(0.6)
    answers = replay.run((), 60.0)
    assert len(answers) > before
    assert all(answer.done and len(answer.times) == answer.output_tokens for answer in answers)
    assert arena.read > read
    assert arena.written > written
    assert sum(answer.cached_tokens for answer in answers[before:]) > 0.5 * sum(
        a.prompt_tokens for a in answers[before:]
    )
    scheduler.check_integrity()
    arena.close()


def test_sparse_prompts_have_times_of_their_own() -> None:
    options = SparsePrefill(budget=0.3, min_tokens=500)
    chunks = {(n, context): n * 1e-5 + 1e-9 * (n * context + n * (n + 1) // 2) for n in (64, 512) for context in (0, 9)}
    sparse = {
        (n, context): n * 2e-5 + 3e-9 * options.pairs(context, n, context + n + BEHIND)
        for n in (64, 512)
        for context in (1000, 90_000)
    }
    decodes = {(1, 8): 1e-3, (1, 16): 1e-3}
    times = fit_step_times(MeasuredSteps(decodes, chunks, sparse), options)
    plan = StepPlan(1, runs=(Run(7, 9, array("I", [1] * 512), 0, array("I")),))
    assert times.of(plan) == pytest.approx(chunks[512, 9])
    pairs = options.pairs(20_000, 512, 40_000)
    assert times.of(replace(plan, sparse=True, sparse_pairs=pairs)) == pytest.approx(512 * 2e-5 + 3e-9 * pairs)


@pytest.mark.parametrize("length", [499, 500])
def test_the_scheduler_tells_which_prompts_are_sparse(length: int) -> None:
    options = SparsePrefill(min_tokens=500)
    config = SchedulerConfig(2048, 256, 16, sparse=options)
    scheduler = Scheduler(config, BlockPool(40), lambda: 0.0, budget=TokenBudget(0.05, 64))
    scheduler.add(Request(1, array("I", [1] * length), ChainKey(b"m" * 32), Sampling(), sparse_prefill=True))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.sparse == (length == 500)
    assert plan.sparse_pairs == (options.pairs(0, 256, 500) if plan.sparse else 256 * 257 / 2)


def test_routing_as_uneven_as_it_was_measured() -> None:
    wanted = expert_shares(64)
    assert wanted.mean().item() == pytest.approx(1)
    assert wanted[0] == pytest.approx(max(SHARES), rel=0.05)
    biases = SkewedRouting(4, 1.28)("model.layers.1.mlp.expert_bias", 64)
    scores = (torch.randn(8000, 64, generator=torch.Generator().manual_seed(1)) * 1.28).sigmoid()
    counts = torch.bincount((scores + biases).topk(4, 1).indices.flatten(), minlength=64).float()
    found = (counts / counts.mean()).sort(descending=True).values
    torch.testing.assert_close(found, wanted, atol=0.12, rtol=0)
