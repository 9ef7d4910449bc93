"""What of each prompt goes into one step: whose turn it is, where chunks of sparse prompts end, and when these wait."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_engine.plan import Run, StepPlan
from katydid_engine.prefills import Prefills
from katydid_engine.request import LiveRequest, Request, Sequence
from katydid_engine.sparse_prefill import SparsePrefill
from katydid_engine.token_budget import TokenBudget
from katydid_runtime.block_hash import ChainKey

TPOT_S, TTFT_S = 0.05, 4.0
FIRST_S, TOKEN_S = 0.01, 1e-4
SPARSE = SparsePrefill(min_tokens=500, tail_blocks=2)


def prompt(tokens: int, *, done: int = 0, sparse: bool = False, priority: int = 0) -> Sequence:
    request = Request(1, array("I", [7] * tokens), ChainKey(b"m" * 32), sparse_prefill=sparse, priority=priority)
    sequence = Sequence(1, LiveRequest(request, 1))
    sequence.num_scheduled = done
    return sequence


def row(first_token_at: float) -> Sequence:
    """That decodes, with one token so far."""
    sequence = prompt(10)
    sequence.live.first_token_at = first_token_at
    sequence.tokens.append(3)
    return sequence


def prefills(tpot_s: float | None = None, ttft_s: float | None = None, *, sparse_first_s: float = FIRST_S) -> Prefills:
    """Steps take ``FIRST_S`` and ``TOKEN_S`` a token, sparse ones ``sparse_first_s`` at least."""
    budget = TokenBudget(tpot_s, 64)
    decode = Run(1, 5, array("I", [1]), 0, array("I"))
    for tokens in (100, 400, 1600) * 10:
        plan = StepPlan(1, runs=(decode, Run(2, 0, array("I", [1]) * tokens, 0, array("I"))), num_decodes=1)
        budget.took(plan, FIRST_S + TOKEN_S * tokens)
        plan = StepPlan(1, runs=plan.runs, num_decodes=1, sparse=True, sparse_pairs=plan.num_prefill_pairs)
        budget.took(plan, sparse_first_s + TOKEN_S * tokens)
    return Prefills(budget, ttft_s, SPARSE)


def test_without_targets_a_step_is_dealt_out() -> None:
    assert prefills().choose([prompt(900), prompt(100)], [], 800, 1.0, 0.0, 1) == [700, 100]
    assert not prefills().by_time


@pytest.mark.parametrize("targets", [(TPOT_S, None), (None, TTFT_S), (TPOT_S, TTFT_S)])
def test_with_any_target_it_matters_what_steps_take(targets: tuple[float | None, float | None]) -> None:
    assert prefills(*targets).by_time


def test_whose_turn_it_is_comes_first_and_the_others_get_what_is_left() -> None:
    chunks = prefills(ttft_s=TTFT_S).choose([prompt(900), prompt(300), prompt(500)], [], 1000, 1.0, 0.0, 1)
    assert chunks == [700, 300, 0]


def test_beside_rows_it_gets_what_their_pace_leaves_and_the_others_nothing() -> None:
    chosen = prefills(TPOT_S, TTFT_S).choose([prompt(3000), prompt(2000)], [row(0.0)], 8000, 1.0, 2.0, 1)
    assert chosen[0] == 0
    assert chosen[1] == pytest.approx((TPOT_S - FIRST_S) / TOKEN_S, rel=0.05)
    twice = prefills(TPOT_S, TTFT_S).choose([prompt(3000), prompt(2000)], [row(0.0)], 8000, 2.0, 2.0, 1)
    assert twice[1] == pytest.approx((2 * TPOT_S - FIRST_S) / TOKEN_S, rel=0.05), "rows that yield two tokens a step"


def test_lower_priority_has_every_eighth_step() -> None:
    waiting = [prompt(3000, priority=1), prompt(64)]
    served = [turn for turn in range(1, 33) if prefills(ttft_s=TTFT_S).choose(waiting, [], 64, 1.0, 0.0, turn)[1]]
    assert served == [8, 16, 24, 32]


def test_chunks_of_sparse_prompts_end_between_blocks() -> None:
    either = prefills(ttft_s=TTFT_S)
    assert either.choose([prompt(1000, sparse=True)], [], 300, 1.0, 0.0, 1) == [256]
    assert either.choose([prompt(1000, sparse=True, done=256)], [], 800, 1.0, 0.0, 1) == [744], "the last as it is"
    assert either.choose([prompt(1000, sparse=False)], [], 300, 1.0, 0.0, 1) == [300], "not allowed"
    assert either.choose([prompt(499, sparse=True)], [], 300, 1.0, 0.0, 1) == [300], "too short"
    assert Prefills(TokenBudget(None, 64), TTFT_S).choose([prompt(1000, sparse=True)], [], 300, 1.0, 0.0, 1) == [300]


def test_beside_rows_the_last_blocks_of_a_sparse_prompt_have_a_step_of_their_own() -> None:
    # Of 1000 tokens in eight blocks two attend to everything: from token 768 on.
    for done, chunk in ((0, 768), (512, 256), (700, 68), (768, 232), (896, 104)):
        long = prompt(1000, sparse=True, done=done)
        assert prefills(10.0, TTFT_S).choose([long], [row(0.0)], 4000, 1.0, 0.0, 1) == [chunk]
        assert prefills(ttft_s=TTFT_S).choose([long], [], 4000, 1.0, 0.0, 1) == [1000 - done]


def test_a_sparse_prompt_waits_until_rows_are_ahead() -> None:
    slow = prefills(TPOT_S, TTFT_S, sparse_first_s=0.4)
    long = [prompt(6000, sparse=True)]
    assert slow.choose(long, [row(0.0)], 4000, 1.0, 2.0, 1) == [0], "its token is due"
    assert slow.choose(long, [row(0.0)], 4000, 1.0, 2.0, 8)[0] > 0, "but not for ever"
    assert slow.choose(long, [row(1.9)], 4000, 1.0, 2.0, 1)[0] > 0, "a row that has just begun may wait"
    assert slow.choose(long, [row(1.9), row(0.0)], 4000, 1.0, 2.0, 1) == [0], "the last of them counts"
    assert slow.choose([prompt(6000)], [row(0.0)], 4000, 1.0, 2.0, 1)[0] > 0, "dense steps are short enough"


@given(st.floats(0.01, 1), st.integers(0, 5), st.integers(1, 3000), st.lists(st.integers(1, 500), max_size=8))
def test_pairs_that_are_kept_add_up_and_are_no_more_than_there_are(
    budget: float, tail_blocks: int, tokens: int, chunks: list[int]
) -> None:
    options = SparsePrefill(budget=budget, tail_blocks=tail_blocks)
    whole, start, found = options.pairs(0, tokens, tokens), 0, 0.0
    for chunk in [*chunks, tokens]:
        count = min(chunk, tokens - start)
        if count:
            found += options.pairs(start, count, tokens)
            start += count
    assert found == pytest.approx(whole)
    assert 0 < whole <= tokens * tokens / 2 * (1 + 1e-9)
