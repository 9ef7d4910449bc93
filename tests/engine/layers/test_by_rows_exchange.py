"""A pass of few rows and one of many through the exchange that chooses: what a residual that is never split gives."""

from __future__ import annotations

import pytest
import torch
from katydid_engine.layers.by_rows_exchange import ByRowsExchange
from katydid_engine.layers.exchange import Exchange
from katydid_engine.layers.few_rows_exchange import FewRowsExchange
from katydid_engine.layers.peer_exchange import PeerExchange

from tests.engine.layers import test_few_rows_exchange as of_few
from tests.engine.layers import test_peer_exchange as of_many
from tests.engine.thread_group import ThreadGroup, on_ranks

RANKS, HIDDEN = 4, 32


class Peers(of_few.ReferencePeers, of_many.ReferencePeers):
    def __init__(self, group: ThreadGroup) -> None:
        of_many.ReferencePeers.__init__(self, group, 64)


@pytest.mark.parametrize(("tokens", "kept", "calls"), [(2, 2, 3), (8, 8, 3), (10, 3, 3)])
def test_a_pass_ends_with_the_same_rows(tokens: int, kept: int, calls: int) -> None:
    def work(group: ThreadGroup) -> None:
        dtype, peers = torch.bfloat16, Peers(group)
        few, many = FewRowsExchange(group, peers), PeerExchange(group, peers)
        ways = (ByRowsExchange(few, many, 8), Exchange(group, sequence_parallel=False))
        norm = of_few.norm(dtype)
        summands = [of_few.rows(10 * number + group.rank, tokens, dtype) for number in range(3)]
        ends = []
        for way in ways:
            x, residual = way.begin(summands[0].clone())
            if residual is None:
                assert isinstance(x, torch.Tensor)
                residual = x
            else:
                _, residual = way.through(norm, None, x, residual, tokens)
            entered, residual = way.through(norm, None, way.leave_open([summands[1].clone()]), residual, tokens)
            assert len(entered.rows) == tokens
            assert residual.shape[0] == (kept if way is ways[0] else tokens)
            ends.append(way.last(norm, way.leave_open([summands[2].clone()]), residual, tokens))
        assert of_many.relative(*ends) < 0.01
        assert ways[0].splits(tokens) == (tokens > 8)
        assert peers.calls == calls

    on_ranks(RANKS, work)
