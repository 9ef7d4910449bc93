"""The sampler: what it remembers of a sequence, what it bans, and that a row's token depends on its sequence alone."""

from __future__ import annotations

import math
from array import array
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_engine.plan import Start
from katydid_engine.request import Sampling
from katydid_engine.sampler import Row, SequenceSampler, sample_rows, token_logprobs

VOCAB = 12


def start(prompt: list[int], output: list[int], sampling: Sampling) -> SequenceSampler:
    tokens = array("I", prompt + output)
    return SequenceSampler(Start(1, sampling, len(prompt), tokens), eos_token_ids=(5,))


def seen(sampler: SequenceSampler) -> tuple[set[int], Counter[int]]:
    entries = sampler.seen(VOCAB, torch.device("cpu")).tolist()
    counts = Counter({token: entry & 0x7FFF for token, entry in enumerate(entries) if entry & 0x7FFF})
    return {token for token, entry in enumerate(entries) if entry < 0}, counts


def test_penalties_count_what_they_should() -> None:
    sampler = start([1, 2, 1], [3, 3, 1], Sampling(repetition_penalty=1.2))
    assert seen(sampler) == ({1, 2}, Counter({3: 2, 1: 1}))
    sampler.note(4)
    sampler.note(3)
    assert seen(sampler) == ({1, 2}, Counter({3: 3, 1: 1, 4: 1}))
    assert seen(start([1], [], Sampling(presence_penalty=1.0))) == ({1}, Counter())


def test_any_penalty_off_its_neutral_value_penalises() -> None:
    assert not start([1], [], Sampling()).penalises
    for sampling in (
        Sampling(repetition_penalty=0.9),
        Sampling(presence_penalty=-1.0),
        Sampling(frequency_penalty=0.1),
    ):
        assert start([1], [], sampling).penalises


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    taken_up=st.integers(0, 8),
    penalties=st.tuples(st.floats(0.5, 2.0), st.floats(-2.0, 2.0), st.floats(-2.0, 2.0)),
    seed=st.integers(0, 1000),
)
def test_counts_carried_on_are_those_of_a_sequence_started_again(
    prompt: list[int], taken_up: int, penalties: tuple[float, float, float], seed: int
) -> None:
    """Preempted, resumed or forked, a sequence begins anew with its output so far, and its tokens are the same."""
    repetition, presence, frequency = penalties
    sampling = Sampling(
        temperature=0.7,
        seed=seed,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(seed))

    def go_on(output: list[int]) -> list[int]:
        sampler = start(prompt, output, sampling)
        for step in range(len(output), 9):
            # Beside a row without penalties, on either side of it.
            other = Row(start([1], [], Sampling()), 0, 3)
            rows = [other, Row(sampler, 0, len(prompt) + step)][:: 1 if step % 2 else -1]
            tokens = sample_rows(logits[[step, step]], rows)
            output.append(tokens[1 if step % 2 else 0])
            sampler.note(output[-1])
        return output

    whole = go_on([])
    assert go_on(whole[:taken_up]) == whole


def test_a_token_seen_is_penalised_and_its_neighbours_are_not() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.8, -3.0]]).repeat(2, 1)
    penalised = start([3], [0], Sampling(presence_penalty=0.15))
    assert sample_rows(logits, [Row(penalised, 0, 2), Row(start([3], [0], Sampling()), 0, 2)]) == [1, 0]
    penalised.note(1)
    assert sample_rows(logits[:1], [Row(penalised, 0, 3)]) == [0], "0.85 beside 0.75 and 0.8"
    penalised.note(0)
    assert sample_rows(logits[:1], [Row(penalised, 0, 4)]) == [0], "presence counts once"


def test_stop_tokens_are_banned_before_min_tokens() -> None:
    sampler = start([1, 2], [], Sampling(min_tokens=2, stop_token_ids=(7,), logit_bias=((7, 5.0), (8, 1.0))))
    banned = {7: -math.inf, 8: 1.0, 5: -math.inf}
    assert sampler.bias(2) == banned
    assert sampler.bias(3) == {7: 5.0, 8: 1.0}
    free = start([1, 2], [], Sampling(min_tokens=2, ignore_eos=True))
    assert free.bias(2) == {}


def test_a_row_is_sampled_by_its_seed_choice_and_position_alone() -> None:
    logits = torch.randn(1, 50).repeat(3, 1)
    sampler = start([1], [], Sampling(temperature=1.0, seed=41))
    same = start([1], [], Sampling(temperature=1.0, seed=42))
    rows = [Row(sampler, 1, 9), Row(same, 0, 9), Row(same, 0, 9)]
    assert len(set(sample_rows(logits, rows))) == 1
    draws = sample_rows(logits[:1].repeat(200, 1), [Row(same, 0, position) for position in range(200)])
    assert len(set(draws)) > 10


def test_seeds_wrap_at_64_bits() -> None:
    logits = torch.randn(1, 50).repeat(2, 1)
    last = start([1], [], Sampling(temperature=1.0, seed=2**64 - 1))
    first = start([1], [], Sampling(temperature=1.0, seed=0))
    assert len(set(sample_rows(logits, [Row(last, 1, 4), Row(first, 0, 4)]))) == 1


def test_logprobs_as_the_host_sees_them() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), -math.inf]])
    found = token_logprobs(logits, [0], 2)
    assert (found.top, list(found.top_tokens)) == (2, [1, 0])
    torch.testing.assert_close(
        torch.tensor([*found.chosen, *found.top_logprobs]).exp(), torch.tensor([0.25, 0.75, 0.25])
    )
