"""The exchange over peers' memory against the general one: the same bytes are rounded, so the same rows arrive."""

from __future__ import annotations

import pytest
import torch
from katydid_engine.layers.activations import Fp8Input, QuantizedRows
from katydid_engine.layers.exchange import Exchange
from katydid_engine.layers.peer_exchange import PeerExchange
from katydid_kernels.peer_reduce import quantized_all_gather_reference, quantized_reduce_scatter_reference
from torch import Tensor

from tests.engine.thread_group import ThreadGroup, on_ranks

RANKS, HIDDEN, TOKENS = 4, 32, 10


class ReferencePeers:
    """What the kernels are defined by, over a group of threads."""

    def __init__(self, group: ThreadGroup, tokens: int) -> None:
        self.tokens = tokens
        self._group = group
        self.calls = 0

    def quantized_all_gather(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return quantized_all_gather_reference(list(self._group.all_gather(x, 0).chunk(RANKS)))

    def quantized_reduce_scatter(self, x: Tensor) -> Tensor:
        self.calls += 1
        return quantized_reduce_scatter_reference(list(self._group.all_gather(x, 0).chunk(RANKS)), self._group.rank)


def rows(seed: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("limit", "dtype", "calls"), [(64, torch.bfloat16, 3), (8, torch.bfloat16, 0), (64, torch.float32, 0)]
)
def test_the_same_rows_arrive(limit: int, dtype: torch.dtype, calls: int) -> None:
    def work(group: ThreadGroup) -> None:
        peers = ReferencePeers(group, limit)
        special, general = PeerExchange(group, peers), Exchange(group, sequence_parallel=True, fp8=True)
        own, summand = rows(group.rank, 3, dtype), rows(10 + group.rank, TOKENS, dtype)
        plain = [way.enter_for(None, own, TOKENS) for way in (special, general)]
        assert torch.equal(*plain)
        quantised = [way.enter_for(Fp8Input(), own, TOKENS) for way in (special, general)]
        assert all(isinstance(found, QuantizedRows) for found in quantised)
        assert torch.equal(quantised[0].values.float(), quantised[1].values.float())
        assert torch.equal(quantised[0].scale, quantised[1].scale)
        torch.testing.assert_close(special.leave(summand), general.leave(summand), atol=1e-6, rtol=1e-2)
        assert peers.calls == calls

    on_ranks(RANKS, work)


def test_rows_with_scales_of_another_kind_go_the_general_way() -> None:
    def work(group: ThreadGroup) -> None:
        peers = ReferencePeers(group, 64)
        exchange = PeerExchange(group, peers)
        exchange.enter_for(Fp8Input(torch.tensor([0.1])), rows(group.rank, 3, torch.bfloat16), TOKENS)
        assert peers.calls == 0
        assert (exchange.parts, exchange.quantises_first) == (1, False)

    on_ranks(RANKS, work)
