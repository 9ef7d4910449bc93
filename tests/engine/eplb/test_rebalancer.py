"""Rebalancers of several ranks in one process, with a post office between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from katydid_engine.collectives import SingleRank
from katydid_engine.eplb.balance import imbalance
from katydid_engine.eplb.rebalancer import BalanceState, Rebalancer
from katydid_engine.layers.expert_table import ExpertTable
from torch import Tensor

EXPERTS, COPIES, RANKS, LAYERS = 8, 4, 4, 3
EACH = (EXPERTS + COPIES) // RANKS
CPU = torch.device("cpu")


class Post:
    """What ranks have posted in their n-th call, by n."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[Tensor, list[int]]]] = [[] for _ in range(RANKS)]


class Letters:
    def __init__(self, post: Post, rank: int, call: int, out: Tensor) -> None:
        self.post, self.rank, self.call, self.out = post, rank, call, out

    def done(self) -> bool:
        return all(len(calls) > self.call for calls in self.post.calls)

    def wait(self) -> Tensor:
        assert self.done()
        parts = [rows.split(send)[self.rank] for rows, send in (calls[self.call] for calls in self.post.calls)]
        return self.out.copy_(torch.cat(parts))


class Group(SingleRank):
    def __init__(self, post: Post, rank: int, total: Tensor) -> None:
        self.post, self.rank, self.size, self.total = post, rank, RANKS, total

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.total.clone()

    def all_to_all(
        self,
        x: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
        out: Tensor | None = None,
    ) -> Letters:
        assert send is not None
        assert receive is not None
        assert out is not None
        assert len(out) == sum(receive)
        calls = self.post.calls[self.rank]
        calls.append((x, list(send)))
        return Letters(self.post, self.rank, len(calls) - 1, out)


class Layer:
    """Expert e's weights are full of 10 * layer + e, in two tensors of different types."""

    def __init__(self, rank: int, layer: int) -> None:
        self.table = ExpertTable(EXPERTS, COPIES, CPU)
        self.rank, self.base, self.room = rank, 10 * layer, True
        own = torch.tensor(self.table.held[rank * EACH : (rank + 1) * EACH]) + self.base
        self._tensors = (
            own.to(torch.float8_e4m3fn)[:, None, None].repeat(1, 2, 3),
            own.float()[:, None].repeat(1, 5),
        )

    @property
    def slots(self) -> tuple[Tensor, ...]:
        if not self.room:
            raise torch.OutOfMemoryError("no room")
        return self._tensors

    def check(self) -> None:
        own = self.table.held[self.rank * EACH : (self.rank + 1) * EACH]
        for tensor in self._tensors:
            wanted = (torch.tensor(own) + self.base).to(tensor.dtype).float()
            assert torch.equal(tensor.float().flatten(1).amax(1), wanted)
            assert torch.equal(tensor.float().flatten(1).amin(1), wanted)


class Ranks:
    def __init__(self, interval: int = 3) -> None:
        self.total = torch.ones((LAYERS, EXPERTS), dtype=torch.int64)
        post = Post()
        self.told: list[BalanceState] = []
        with torch.inference_mode():  # as a model is built, and passes
            self.layers = [[Layer(rank, layer) for layer in range(LAYERS)] for rank in range(RANKS)]
        self.ranks = [
            Rebalancer(
                self.layers[rank],
                Group(post, rank, self.total),
                interval=interval,
                clock=lambda: 7.0,
                tell=self.told.append,
            )
            for rank in range(RANKS)
        ]

    def round(self, *, passing: bool = True) -> None:
        for rank in self.ranks:
            rank.meanwhile()
        told = [rank.progress() for rank in self.ranks]
        with torch.inference_mode():
            for rank in self.ranks:
                rank.agreed(told, passing=passing)
        self.check()

    def check(self) -> None:
        """On every rank the same tables, and in every slot what they say."""
        for own in self.layers:
            for layer, first in zip(own, self.layers[0], strict=True):
                assert layer.table.held == first.table.held
                layer.check()

    def imbalances(self) -> list[float]:
        return [
            imbalance(loads.double().numpy(), np.array(layer.table.held), RANKS)
            for loads, layer in zip(self.total, self.layers[0], strict=True)
        ]


@pytest.fixture
def ranks() -> Ranks:
    ranks = Ranks()
    ranks.total[:] = torch.tensor([10, 10, 10, 10, 300, 290, 10, 10]) + torch.arange(LAYERS)[:, None]
    return ranks


def test_a_skewed_load_is_balanced_layer_by_layer(ranks: Ranks) -> None:
    assert min(ranks.imbalances()) > 1.7
    seen = []
    while not ranks.ranks[0].state.finished:
        ranks.round()
        seen.append(ranks.ranks[0].state.layers_moved)
        assert len(seen) < 20
    assert max(ranks.imbalances()) < 1.3
    assert {1, 2} <= set(seen)  # not all at once
    assert {told.layers_moved for told in ranks.told} == {0, 1, 2, 3}
    state = ranks.ranks[0].state
    assert (state.finished, state.abandoned, state.placed_at) == (1, 0, 7.0)
    assert state.layers_moved == state.layers == LAYERS


def test_idle_rounds_go_on_with_a_rebalancing_and_begin_none(ranks: Ranks) -> None:
    for _ in range(20):
        ranks.round(passing=False)
    assert ranks.ranks[0].state.finished == 0
    for _ in range(3):
        ranks.round()
    for _ in range(20):
        ranks.round(passing=False)
    assert ranks.ranks[0].state.finished == 1


def test_an_even_load_moves_nothing() -> None:
    ranks = Ranks()
    ranks.total[:] = torch.tensor([2, 2, 2, 2, 1, 1, 1, 1])  # the first four have two copies each
    assert ranks.imbalances() == [1.0] * LAYERS
    before = [layer.table.held for layer in ranks.layers[0]]
    for _ in range(10):
        ranks.round()
    assert [layer.table.held for layer in ranks.layers[0]] == before
    assert ranks.ranks[0].state.finished == 0


def test_a_rank_without_room_ends_it_for_all_and_it_is_tried_again(ranks: Ranks) -> None:
    ranks.layers[2][1].room = False
    for _ in range(8):
        ranks.round()
    states = [rank.state for rank in ranks.ranks]
    assert {(state.abandoned, state.finished) for state in states} == {(1, 0)}
    # The first layer was moved before, and stays.
    moved, left, _ = ranks.imbalances()
    assert moved < 1.3
    assert left > 1.7
    ranks.layers[2][1].room = True
    for _ in range(20):
        ranks.round()
    assert ranks.ranks[0].state.finished >= 1
    assert max(ranks.imbalances()) < 1.3
