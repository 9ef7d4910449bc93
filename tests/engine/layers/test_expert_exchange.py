"""Rows to experts on four ranks and back, against all experts on one."""

from __future__ import annotations

import pytest
import torch
from katydid_engine.layers.activations import Activations
from katydid_engine.layers.expert_exchange import ExpertExchange
from katydid_engine.layers.experts import PlainExperts
from katydid_engine.layers.steps import finish, interleave
from katydid_engine.rank_slice.absent_ranks import AbsentRanks
from torch import Tensor

from tests.engine.thread_group import ThreadGroup, on_ranks

RANKS, SLOTS, TOP_K, HIDDEN, WIDTH = 4, 3, 5, 16, 8
EXPERTS = RANKS * SLOTS
ROWS = (5, 0, 9, 1)


class Case:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.w13, self.w2 = normal(EXPERTS, 2 * WIDTH, HIDDEN), normal(EXPERTS, HIDDEN, WIDTH)
        self.x = [normal(rows, HIDDEN) for rows in ROWS]
        self.weights = [normal(rows, TOP_K).abs() for rows in ROWS]
        self.ids = [
            torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(rows)]).int()
            if rows
            else torch.empty((0, TOP_K), dtype=torch.int32)
            for rows in ROWS
        ]

    def expected(self, rank: int) -> Tensor:
        experts = PlainExperts(self.w13, self.w2, 0)
        return experts(self.x[rank], self.weights[rank], self.ids[rank], None) + 1

    def run(self, group: ThreadGroup, *, capacity: int | None, fp8: bool = False, parts: int = 1) -> Tensor:
        own = slice(group.rank * SLOTS, (group.rank + 1) * SLOTS)
        experts = PlainExperts(self.w13[own], self.w2[own], own.start)
        exchange = ExpertExchange(group, SLOTS, HIDDEN, torch.float32, consumer=None, fp8=fp8)
        exchange.capacity = capacity

        def compute(rows: Activations, weights: Tensor, ids: Tensor) -> Tensor:
            return experts(rows, weights, ids, None)

        x, weights, ids = (data[group.rank] for data in (self.x, self.weights, self.ids))
        if parts == 1:
            return finish(exchange.run(x, weights, ids, compute, lambda: torch.ones_like(x)))
        cut = len(x) // 2
        works = [
            exchange.run(x[part], weights[part], ids[part], compute, lambda: torch.ones(()))
            for part in (slice(0, cut), slice(cut, None))
        ]
        return torch.cat(interleave(works))


@pytest.mark.parametrize(("capacity", "parts"), [(None, 1), (9, 1), (20, 1), (None, 2), (9, 2)])
def test_ranks_together_are_one(capacity: int | None, parts: int) -> None:
    case = Case()
    found = on_ranks(RANKS, lambda group: case.run(group, capacity=capacity, parts=parts))
    for rank, rows in enumerate(found):
        torch.testing.assert_close(rows, case.expected(rank), atol=1e-5, rtol=1e-5)


def test_quantised_there_and_back() -> None:
    case = Case()
    for rank, rows in enumerate(on_ranks(RANKS, lambda group: case.run(group, capacity=None, fp8=True))):
        expected = case.expected(rank)
        error = (rows - expected).norm() / max(float(expected.norm()), 1e-9)
        assert error < 0.06
        assert len(expected) == 0 or error > 1e-4


def test_a_row_goes_once_to_a_rank_and_rows_to_nowhere_stay() -> None:
    """Counted where they are handed over; the fixed form sends as many whatever the routing is."""
    sent = []

    class Noting(AbsentRanks):
        def all_to_all(self, x: Tensor, send=None, receive=None, out=None):  # type: ignore[no-untyped-def]
            if x.ndim == 2:
                sent.append(len(x))
            return super().all_to_all(x, send, receive, out)

    exchange = ExpertExchange(Noting(0, RANKS), SLOTS, HIDDEN, torch.float32, consumer=None, fp8=False)
    # Experts 0 to 2 are rank 0's, 3 to 5 rank 1's.
    ids = torch.tensor([[0, 1, 2, 3, 4], [3, 4, 5, 3, 4], [exchange.nowhere] * 5], dtype=torch.int32)
    x, weights = torch.randn(3, HIDDEN), torch.ones(3, 5)

    def compute(rows: Activations, weights: Tensor, ids: Tensor) -> Tensor:
        assert isinstance(rows, Tensor)
        return rows

    out = finish(exchange.run(x, weights, ids, compute, lambda: None))
    assert sent == [3, 3]
    assert torch.equal(out[2], torch.zeros(HIDDEN))
    sent.clear()
    exchange.capacity = 6
    finish(exchange.run(x, weights, ids, compute, lambda: None))
    assert sent == [24, 24]
