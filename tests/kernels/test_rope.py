"""Rotary embedding against complex multiplication."""

from __future__ import annotations

import cmath

import pytest
import torch
from katydid_kernels import rope, rope_table

FREQUENCIES = torch.tensor([1.0, 0.25, 0.01])


@pytest.mark.parametrize("position", [0, 1, 7, 999])
def test_heads_turn_as_complex_numbers(position: int) -> None:
    """Element i and element i + n/2 of a head are one complex number, turned by position * frequency."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6)
    positions = torch.tensor([position, 3], dtype=torch.int32)
    found = rope(x, rope_table(FREQUENCIES, 1000), positions)
    for token, head, i in ((t, h, i) for t in range(2) for h in range(3) for i in range(3)):
        turned = complex(x[token, head, i], x[token, head, i + 3]) * cmath.exp(
            1j * int(positions[token]) * float(FREQUENCIES[i])
        )
        assert abs(complex(found[token, head, i], found[token, head, i + 3]) - turned) < 1e-4


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 2, 6).to(torch.bfloat16)
    assert torch.equal(rope(x, rope_table(FREQUENCIES, 1), torch.zeros(1, dtype=torch.int32)), x)


def test_scores_depend_on_distance_alone() -> None:
    torch.manual_seed(1)
    q, k = torch.randn(1, 1, 6), torch.randn(1, 1, 6)
    table = rope_table(FREQUENCIES, 600)

    def score(q_at: int, k_at: int) -> float:
        at = (torch.tensor([p], dtype=torch.int32) for p in (q_at, k_at))
        return float((rope(q, table, next(at)) * rope(k, table, next(at))).sum())

    assert score(5, 2) == pytest.approx(score(503, 500), abs=1e-4)
    assert abs(score(5, 2) - score(6, 2)) > 1e-3
