"""Tokens sampled over parts of the vocabulary against those of whole rows, on ranks that are threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_engine.layers.embedding import LmHead
from katydid_engine.parted_vocabulary import sample_parts
from katydid_engine.weights import Weights
from katydid_kernels import SamplingBatch, sample
from torch import Tensor

from tests.engine.thread_group import ThreadGroup, on_ranks

HIDDEN = 6


class OneMatrix:
    """A ``TensorSource`` of one tensor."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def has(self, name: str) -> bool:
        return True

    def stored(self, name: str) -> None:
        return None

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...], dtypes: tuple[str, ...] = ()) -> Tensor:
        return self._weight[part]


def head_of(weight: Tensor, group: ThreadGroup) -> LmHead:
    weights = Weights(OneMatrix(weight), torch.device("cpu"), torch.float32, rank=group.rank, size=group.size)
    return LmHead(weights.scope("lm_head"), group, *weight.shape, tied=None, fp32=True)


def batch_of(rows: int, seed: int, *, filters: bool) -> SamplingBatch:
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[float]) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    return SamplingBatch(
        temperature=pick([0.0, 0.6, 1.0, 1.7]),
        top_k=pick([0, 1, 5, 40]).int() if filters else torch.zeros(rows, dtype=torch.int32),
        top_p=pick([1.0, 0.9, 0.3]) if filters else torch.ones(rows),
        min_p=pick([0.0, 0.05]) if filters else torch.zeros(rows),
        seeds=torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator),
        positions=torch.randint(0, 200_000, (rows,), generator=generator, dtype=torch.int32),
    )


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([2, 3, 4]), st.integers(1, 9), st.integers(5, 90), st.integers(0, 99), st.booleans())
def test_every_rank_comes_to_the_tokens_of_whole_rows(
    ranks: int, rows: int, vocab: int, seed: int, filters: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, HIDDEN, generator=generator)
    hidden = torch.randn(rows, HIDDEN, generator=generator)
    # One row is no number, one has equals.
    hidden[-1, 0] = torch.nan if seed % 3 == 0 else 0.5
    hidden[0] = 0
    batch = batch_of(rows, seed, filters=filters)

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor, Tensor]:
        head = head_of(weight, group)
        sound = torch.empty(rows, dtype=torch.bool)
        return sample_parts(head, group, hidden, batch, filters=filters, sound=sound), sound, head(hidden)

    found = on_ranks(ranks, work)
    logits = found[0][2]
    expected_sound = torch.empty(rows, dtype=torch.bool)
    expected = sample(logits, batch, sound=expected_sound)
    good = expected_sound.nonzero().squeeze(1)
    for tokens, sound, _ in found:
        assert tokens.dtype == torch.int32
        assert tokens[good].tolist() == expected[good].tolist()
        assert sound.tolist() == expected_sound.tolist()
        assert tokens.tolist() == found[0][0].tolist()
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocab


@pytest.mark.parametrize("filters", [False, True])
def test_what_ranks_send_is_a_part_of_the_logits(filters: bool) -> None:
    ranks, rows, vocab = 4, 16, 4000
    sent = [0] * ranks

    class Counted(ThreadGroup):
        def _exchange(self, mine):  # type: ignore[no-untyped-def]
            x = mine[0] if isinstance(mine, tuple) else mine
            sent[self.rank] += x.nbytes
            return super()._exchange(mine)

    def work(group: ThreadGroup) -> None:
        group = Counted(group._table, group.rank, group.size)
        head = head_of(torch.ones(vocab, HIDDEN), group)
        batch, sound = batch_of(rows, 1, filters=filters), torch.empty(rows, dtype=torch.bool)
        sample_parts(head, group, torch.ones(rows, HIDDEN), batch, filters=filters, sound=sound)

    on_ranks(ranks, work)
    # A gather has every rank send its whole part to each of the three others.
    gathered = 3 * rows * (vocab // ranks) * 4
    assert max(sent) < gathered * (0.4 if filters else 0.01)
