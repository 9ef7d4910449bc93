"""The best of parts against the sampler of whole rows, token for token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_kernels import SamplingBatch, sample
from katydid_kernels.sample_part import (
    CHUNK,
    best_of_part,
    best_of_part_reference,
    best_of_parts,
    best_of_parts_reference,
    launch,
    launch_choice,
)
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows_of(count: int, vocab: int, seed: int) -> tuple[Tensor, SamplingBatch]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator) * 3
    # Equals, of which the lowest id is taken.
    logits[:, 1::7] = logits[:, :1]
    batch = SamplingBatch(
        temperature=torch.rand(count, generator=generator).mul(2).sub(0.5).clamp(min=0),
        top_k=torch.zeros(count, dtype=torch.int32),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        seeds=torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator),
        positions=torch.arange(count, dtype=torch.int32) * 977,
        filters=False,
    )
    return logits, batch


def of_parts(logits: Tensor, batch: SamplingBatch, parts: int) -> tuple[Tensor, Tensor]:
    room = -(-logits.shape[1] // parts)
    told = [
        best_of_part(part, batch.temperature, batch.seeds, batch.positions, first=room * index, room=room)
        for index, part in enumerate(logits.split(room, dim=1))
    ]
    return best_of_parts(torch.cat(told, dim=1))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 99))
def test_any_parts_choose_what_whole_rows_do(vocab: int, parts: int, seed: int) -> None:
    logits, batch = rows_of(4, vocab, seed)
    tokens, sound = of_parts(logits, batch, parts)
    assert tokens.tolist() == sample(logits, batch).tolist()
    assert sound.all()


def test_chunks_of_a_part_choose_together() -> None:
    logits, batch = rows_of(6, 3 * CHUNK + 11, 5)
    for parts in (1, 2, 4):
        assert of_parts(logits, batch, parts)[0].tolist() == sample(logits, batch).tolist()


def test_rows_that_are_no_numbers_are_told() -> None:
    logits, batch = rows_of(5, 30, 1)
    logits[1, 29] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    tokens, sound = of_parts(logits, batch, 3)
    assert sound.tolist() == [True, False, False, False, True]
    assert tokens[3] == 0
    assert 0 <= int(tokens[1]) < 30


def test_kernel_equals_the_reference() -> None:
    logits, batch = rows_of(3, CHUNK + 333, 9)
    batch.temperature[:2] = torch.tensor([0.0, 0.7])
    logits[2, 77] = torch.nan
    moved = [tensor.to(DEVICE) for tensor in (logits, batch.temperature, batch.seeds, batch.positions)]
    found = launch(*moved, first=15_104, room=2 * CHUNK).cpu()
    expected = best_of_part_reference(
        logits, batch.temperature, batch.seeds, batch.positions, first=15_104, room=2 * CHUNK
    )
    assert torch.equal(found[:2], expected[:2])
    assert found[2, 0, 2:].view(torch.float32).isnan()


def test_what_does_not_fit_is_refused() -> None:
    logits, batch = rows_of(3, 30, 1)
    with pytest.raises(ValueError, match="temperature must be"):
        best_of_part(logits, batch.temperature[:2], batch.seeds, batch.positions, first=0, room=30)
    with pytest.raises(ValueError, match="at most room=8"):
        best_of_part(logits, batch.temperature, batch.seeds, batch.positions, first=0, room=8)


def test_the_best_of_all_parts_by_the_kernel() -> None:
    logits, batch = rows_of(6, 3 * CHUNK + 11, 5)
    logits[1, 29] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    told = best_of_part(logits, batch.temperature, batch.seeds, batch.positions, first=0, room=logits.shape[1])
    told = told.to(DEVICE)
    found, expected = torch.zeros(2, 6, dtype=torch.bool, device=DEVICE)
    tokens = launch_choice(told, found)
    assert torch.equal(tokens[[0, 2, 3, 4, 5]], best_of_parts_reference(told, expected)[[0, 2, 3, 4, 5]])
    assert found.tolist() == expected.tolist() == [True, False, False, False, True, True]
