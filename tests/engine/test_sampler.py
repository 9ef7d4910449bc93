"""The sampler: what it remembers of a sequence, what it bans, and that a row's token depends on its sequence alone."""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_engine.plan import Start
from katydid_engine.request import Sampling
from katydid_engine.sampler import Row, SamplingRows, joined_logprobs, sample_rows
from katydid_engine.seen_tokens import SeenTokens
from katydid_engine.sequence_sampler import SequenceSampler
from katydid_kernels import logprobs, verify_draft
from torch import Tensor

VOCAB = 12
IDS = itertools.count()


def start(prompt: list[int], output: list[int], sampling: Sampling) -> SequenceSampler:
    tokens = array("I", prompt + output)
    return SequenceSampler(Start(next(IDS), sampling, len(prompt), tokens), eos_token_ids=(5,))


class Draws:
    """Samples rows, and notes tokens, as a runner does."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.table = SeenTokens(vocab_size, torch.device("cpu"))

    def sample(self, logits: Tensor, *rows: tuple[SequenceSampler, int, int]) -> list[int]:
        """Rows are sampler, choice and position."""
        asked = [Row(sampler, choice, *sampler.limits(position, [])[0]) for sampler, choice, position in rows]
        positions = torch.tensor([position for _, _, position in rows], dtype=torch.int32)
        tokens: list[int] = sample_rows(logits, asked, positions, self.table).tolist()
        return tokens

    def note(self, sampler: SequenceSampler, *tokens: int) -> None:
        slots = self.table.slots([sampler])
        assert slots is not None
        sampled = torch.tensor([tokens], dtype=torch.int32)
        verify_draft(sampled, sampled[:, :-1], slots=slots, seen=self.table.table)

    def seen(self, sampler: SequenceSampler) -> tuple[set[int], Counter[int]]:
        slots = self.table.slots([sampler])
        assert slots is not None
        entries = self.table.table[int(slots)].tolist()
        counts = Counter({token: entry & 0x7FFF for token, entry in enumerate(entries) if entry & 0x7FFF})
        return {token for token, entry in enumerate(entries) if entry < 0}, counts


def test_penalties_count_what_they_should() -> None:
    draws = Draws()
    sampler = start([1, 2, 1], [3, 3, 1], Sampling(repetition_penalty=1.2))
    assert draws.seen(sampler) == ({1, 2}, Counter({3: 2, 1: 1}))
    draws.note(sampler, 4, 3)
    assert draws.seen(sampler) == ({1, 2}, Counter({3: 3, 1: 1, 4: 1}))
    assert draws.seen(start([1], [], Sampling(presence_penalty=1.0))) == ({1}, Counter())


def test_slots_are_given_again_and_table_grows() -> None:
    draws = Draws()
    many = [start([1, index % VOCAB], [], Sampling(presence_penalty=1.0)) for index in range(20)]
    for index, sampler in enumerate(many):
        assert draws.seen(sampler) == ({1, index % VOCAB}, Counter())
    draws.note(many[3], 7)
    size = len(draws.table.table)
    draws.table.end(many[3].id)
    draws.table.end(many[3].id)
    fresh = [start([2], [], Sampling(presence_penalty=1.0)) for _ in range(size - 19)]
    for sampler in fresh:
        assert draws.seen(sampler) == ({2}, Counter())
    assert len(draws.table.table) == size
    assert draws.seen(many[4]) == ({1, 4}, Counter())


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
        draws = Draws()
        sampler = start(prompt, output, sampling)
        for step in range(len(output), 9):
            # Beside a row without penalties, on either side of it.
            rows = [(start([1], [], Sampling()), 0, 3), (sampler, 0, len(prompt) + step)][:: 1 if step % 2 else -1]
            tokens = draws.sample(logits[[step, step]], *rows)
            output.append(tokens[1 if step % 2 else 0])
            draws.note(sampler, output[-1])
        return output

    whole = go_on([])
    assert go_on(whole[:taken_up]) == whole


def test_a_token_seen_is_penalised_and_its_neighbours_are_not() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.8, -3.0]]).repeat(2, 1)
    penalised = start([3], [0], Sampling(presence_penalty=0.15))
    draws = Draws(4)
    assert draws.sample(logits, (penalised, 0, 2), (start([3], [0], Sampling()), 0, 2)) == [1, 0]
    draws.note(penalised, 1)
    assert draws.sample(logits[:1], (penalised, 0, 3)) == [0], "0.85 beside 0.75 and 0.8"
    draws.note(penalised, 0)
    assert draws.sample(logits[:1], (penalised, 0, 4)) == [0], "presence counts once"


def test_stop_tokens_are_banned_before_min_tokens() -> None:
    sampler = start([1, 2], [], Sampling(min_tokens=2, stop_token_ids=(7,), logit_bias=((7, 5.0), (8, 1.0))))
    banned = {7: -math.inf, 8: 1.0, 5: -math.inf}
    assert sampler.needs_host
    assert sampler.limits(2, [9, 9]) == [(banned, None), ({7: 5.0, 8: 1.0}, None), ({7: 5.0, 8: 1.0}, None)]
    free = start([1, 2], [], Sampling(min_tokens=2, ignore_eos=True))
    assert free.limits(2, []) == [({}, None)]
    assert not start([1, 2], [], Sampling(stop_token_ids=(7,))).needs_host


def test_a_row_is_sampled_by_its_seed_choice_and_position_alone() -> None:
    logits = torch.randn(1, 50).repeat(3, 1)
    sampler = start([1], [], Sampling(temperature=1.0, seed=41))
    same = start([1], [], Sampling(temperature=1.0, seed=42))
    draws = Draws(50)
    assert len(set(draws.sample(logits, (sampler, 1, 9), (same, 0, 9), (same, 0, 9)))) == 1
    many = draws.sample(logits[:1].repeat(200, 1), *((same, 0, position) for position in range(200)))
    assert len(set(many)) > 10


def test_seeds_wrap_at_64_bits() -> None:
    logits = torch.randn(1, 50).repeat(2, 1)
    last = start([1], [], Sampling(temperature=1.0, seed=2**64 - 1))
    first = start([1], [], Sampling(temperature=1.0, seed=0))
    assert len(set(Draws(50).sample(logits, (last, 1, 4), (first, 0, 4)))) == 1


def test_logprobs_as_the_host_sees_them() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), -math.inf]])
    found = joined_logprobs([logprobs(logits, torch.tensor([0]), 2)])
    assert (found.top, list(found.top_tokens)) == (2, [1, 0])
    torch.testing.assert_close(
        torch.tensor([*found.chosen, *found.top_logprobs]).exp(), torch.tensor([0.25, 0.75, 0.25])
    )


def test_parameters_go_to_the_device_as_bits() -> None:
    rows = [
        start([1], [], Sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.25, seed=2**64 - 2)),
        start([1], [], Sampling(seed=5)),
    ]
    bits = SamplingRows(rows, [1, 0]).columns(2)
    seen = {name: torch.from_numpy(bits[name]).view(torch.float32).tolist() for name in ("temperature", "min_p")}
    assert seen == {"temperature": [0.5, 0.5, 0.0, 0.0], "min_p": [0.25, 0.25, 0.0, 0.0]}
    assert bits["top_k"].tolist() == [3, 3, 0, 0]
    assert torch.from_numpy(bits["seeds"]).view(torch.int64).tolist() == [-1, -1, 5, 5]
