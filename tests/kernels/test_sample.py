"""Sampling against exact distributions and a scalar implementation written from the module's numbered list."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_kernels import LogitBias, Penalties, SamplingBatch, logprobs, sample, seen_tokens
from katydid_kernels.philox import gumbel_noise
from katydid_kernels.sample.reference import _likeliest
from torch import Tensor


def batch_of(rows: int, *, temperature: float = 1.0, **fields: float) -> SamplingBatch:
    return SamplingBatch(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), int(fields.get("top_k", 0)), dtype=torch.int32),
        top_p=torch.full((rows,), fields.get("top_p", 1.0)),
        min_p=torch.full((rows,), fields.get("min_p", 0.0)),
        seeds=torch.arange(rows) + 17,
        positions=torch.arange(rows, dtype=torch.int32) * 3,
    )


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def row_of(batch: SamplingBatch, row: int) -> SamplingBatch:
    one = slice(row, row + 1)
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    return SamplingBatch(*(getattr(batch, name)[one] for name in names))


def draw(probabilities: list[float], rows: int = 40_000, **fields: float) -> Tensor:
    """Observed frequencies of tokens over many seeds."""
    logits = torch.tensor(probabilities).log().expand(rows, -1)
    return sample(logits, batch_of(rows, **fields)).bincount(minlength=len(probabilities)) / rows


def assert_frequencies(found: Tensor, expected: list[float], rows: int = 40_000) -> None:
    for token, share in enumerate(expected):
        deviation = math.sqrt(share * (1 - share) / rows)
        assert abs(float(found[token]) - share) <= 4.5 * deviation, (token, float(found[token]), share)


P = [0.4, 0.3, 0.15, 0.1, 0.05]


def test_plain_distribution() -> None:
    assert_frequencies(draw(P), P)


def test_temperature() -> None:
    powers = [p ** (1 / 0.5) for p in P]
    assert_frequencies(draw(P, temperature=0.5), [p / sum(powers) for p in powers])


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_k": 9}, 5),
        ({"top_p": 0.4}, 1),
        ({"top_p": 0.71}, 3),
        ({"top_p": 1e-9}, 1),
        ({"min_p": 0.3}, 3),
        ({"min_p": 1.0}, 1),
        ({"top_k": 3, "top_p": 0.8}, 2),  # of the 0.85 that top-k left, 0.7 is enough
        ({"top_k": 4, "min_p": 0.26}, 3),
    ],
)
def test_filters_keep_the_likeliest(fields: dict[str, float], kept: int) -> None:
    expected = [p / sum(P[:kept]) for p in P[:kept]] + [0.0] * (5 - kept)
    assert_frequencies(draw(P, **fields), expected)


def kept_by_definition(probabilities: list[float], top_k: int, top_p: float) -> set[int]:
    order = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    order = order[: top_k or None]
    total = sum(probabilities[token] for token in order) if top_k else 1.0
    kept, mass = set(), 0.0
    for token in order:
        if top_p < 1 and mass >= top_p * total:
            break
        kept.add(token)
        mass += probabilities[token]
    return kept


@settings(max_examples=200, deadline=None)
@given(
    # Multiples of 1/256: sums are exact, and equals are common.
    parts=st.lists(st.integers(0, 12), min_size=6, max_size=24),
    top_k=st.integers(0, 30),
    top_p=st.integers(1, 16),
    candidates=st.integers(1, 30),
)
def test_kept_set_whatever_the_number_of_candidates(parts: list[int], top_k: int, top_p: int, candidates: int) -> None:
    scaled = [part / 256 for part in parts]
    probabilities = [*scaled, 1.0 - sum(scaled)] if sum(scaled) < 1 else [1.0, *([0.0] * 6)]
    found = _likeliest(
        torch.tensor([probabilities]), torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p / 16]), candidates
    )
    assert set(found[0].nonzero()[:, 0].tolist()) == kept_by_definition(probabilities, top_k, top_p / 16)


def test_top_k_of_equals_keeps_the_lower_ids() -> None:
    assert_frequencies(draw([0.25] * 4, top_k=2), [0.5, 0.5, 0.0, 0.0])


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [3.0, 1.0, 3.0, 3.0]])
    assert sample(logits, batch_of(2, temperature=0.0)).tolist() == [1, 0]


def test_rows_do_not_touch_each_other() -> None:
    """Greedy and sampled rows mixed; each row alone gives the same token; the input stays as it was."""
    torch.manual_seed(0)
    logits = torch.randn(7, 500)
    before = logits.clone()
    batch = replace(
        batch_of(7),
        temperature=torch.tensor([0.0, 1.0, 0.7, 0.0, 2.0, 1.0, 1.0]),
        top_k=torch.tensor([0, 5, 0, 3, 0, 50, 0], dtype=torch.int32),
        top_p=torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 0.8, 1.0]),
    )
    together = sample(logits, batch)
    assert torch.equal(logits, before)
    for row in range(7):
        one = slice(row, row + 1)
        assert sample(logits[one], row_of(batch, row))[0] == together[row]


def test_hints_change_nothing() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 100)
    plain = batch_of(5)
    assert torch.equal(sample(logits, replace(plain, filters=False)), sample(logits, plain))
    greedy = batch_of(5, temperature=0.0)
    assert torch.equal(sample(logits, replace(greedy, samples=False)), sample(logits, greedy))


def test_bias_and_mask() -> None:
    logits = torch.zeros(2, 70)
    bias = LogitBias(int32(0, 1, 3), int32(69, 3, 40), torch.tensor([1.0, 5.0, 4.0]))
    batch = replace(batch_of(2, temperature=0.0), bias=bias)
    assert sample(logits, batch).tolist() == [69, 3]
    # Row 1 may take tokens 40 and 41 alone: bits 8 and 9 of the second word.
    allowed = torch.tensor([[-1, -1, -1], [0, 0b11 << 8, 0]], dtype=torch.int32)
    assert sample(logits, replace(batch, allowed=allowed)).tolist() == [69, 40]


def test_banned_token_is_never_drawn() -> None:
    rows = 2000
    starts = torch.arange(rows + 1, dtype=torch.int32)
    bias = LogitBias(starts, torch.zeros(rows, dtype=torch.int32), torch.full((rows,), -torch.inf))
    tokens = sample(torch.tensor([[9.0, 0.0, 0.0]]).expand(rows, -1), replace(batch_of(rows), bias=bias))
    assert set(tokens.tolist()) == {1, 2}


def scalar_choice(
    logits: list[float], history: list[tuple[int, bool]], penalties: tuple[float, float, float], noise: list[float]
) -> int:
    repetition, presence, frequency = penalties
    values = list(logits)
    for token in range(len(values)):
        if any(token == seen for seen, _ in history):
            values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
        count = sum(token == seen and is_output for seen, is_output in history)
        values[token] -= frequency * count + presence * (count > 0)
    return max(range(len(values)), key=lambda token: values[token] + noise[token])


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    history=st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=20),
    penalties=st.tuples(st.floats(0.5, 2.0), st.floats(-2.0, 2.0), st.floats(-2.0, 2.0)),
)
def test_penalties(seed: int, history: list[tuple[int, bool]], penalties: tuple[float, float, float]) -> None:
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(seed % 2**32))
    seeds = torch.tensor([5, seed])
    # The last two outputs are drafts that the row takes for granted.
    output = [token for token, is_output in history if is_output]
    drafted = [*output[-2:], -1]
    prompt = int32(*(token for token, is_output in history if not is_output))
    record = Penalties(
        int32(-1, 0),
        *(torch.tensor([5.0, value]) for value in penalties),
        seen_tokens(prompt, int32(*output[:-2]), 12)[None],
        torch.tensor([[3] * len(drafted), drafted], dtype=torch.int32),
    )
    batch = replace(batch_of(2), seeds=seeds, penalties=record)
    noise = gumbel_noise(seeds, batch.positions, 12)
    found = sample(logits, batch).tolist()
    assert found[1] == scalar_choice(logits[1].tolist(), history, penalties, noise[1].tolist())
    assert found[0] == int((logits[0] + noise[0]).argmax())  # a row without history and penalties


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs(num_top: int) -> None:
    torch.manual_seed(3)
    logits = torch.randn(4, 33)
    tokens = torch.tensor([0, 7, 32, 5], dtype=torch.int32)
    found = logprobs(logits, tokens, num_top)
    expected = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    torch.testing.assert_close(found.chosen.double(), expected[torch.arange(4), tokens.long()], atol=1e-6, rtol=0)
    assert found.top.shape == found.top_ids.shape == (4, num_top)
    for row in range(4):
        best = sorted(range(33), key=lambda token: -float(logits[row, token]))[:num_top]
        assert found.top_ids[row].tolist() == best
        torch.testing.assert_close(found.top[row].double(), expected[row, best], atol=1e-6, rtol=0)


@pytest.mark.parametrize("threads", [1, 2])
def test_large_vocabulary_rows_keep_their_bits(threads: int) -> None:
    """Reductions over more than 32,768 elements are cut over threads when there are few rows."""
    torch.manual_seed(4)
    logits = 3 * torch.randn(5, 49_152)
    batch = batch_of(5, top_p=0.95, min_p=0.001)
    torch.set_num_threads(threads)
    try:
        tokens = sample(logits, batch)
        whole = logprobs(logits, tokens, 3)
        for row in range(5):
            assert sample(logits[row : row + 1], row_of(batch, row))[0] == tokens[row]
            alone = logprobs(logits[row : row + 1], tokens[row : row + 1], 3)
            assert torch.equal(alone.chosen[0], whole.chosen[row])
            assert torch.equal(alone.top[0], whole.top[row])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}])
@pytest.mark.parametrize("vocab_size", [10, 3000])
def test_row_with_every_token_banned(vocab_size: int, fields: dict[str, float]) -> None:
    logits = torch.zeros(2, vocab_size)
    logits[0] = -torch.inf
    logits[1, :-1] = -torch.inf
    assert sample(logits, batch_of(2, **fields)).tolist() == [0, vocab_size - 1]


def test_empty_batch() -> None:
    assert sample(torch.empty(0, 10), batch_of(0)).shape == (0,)
