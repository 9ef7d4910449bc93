"""The exchange over peers' memory against the general one: the same bytes are rounded, so the same rows arrive."""

from __future__ import annotations

import pytest
import torch
from katydid_engine.layers.activations import Fp8Input, QuantizedRows
from katydid_engine.layers.exchange import Exchange
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.layers.peer_exchange import PeerExchange
from katydid_engine.weights import RandomSource, Weights
from katydid_kernels import quantize_fp8
from katydid_kernels.peer_reduce import (
    add_rms_norm_of_ranks_reference,
    quantized_all_gather_reference,
    quantized_reduce_scatter_reference,
)
from torch import Tensor

from tests.engine.thread_group import ThreadGroup, on_ranks

RANKS, HIDDEN, TOKENS = 4, 32, 10


class ReferencePeers:
    """What the kernels are defined by, over a group of threads."""

    def __init__(self, group: ThreadGroup, tokens: int) -> None:
        self.tokens = tokens
        self._group = group
        self.calls = 0

    def all_reduce_many(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        quantized: bool = False,
        fp8: bool = False,
        own: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        self.calls += 1
        summands = list(self._group.all_gather(x, 0).chunk(RANKS))
        if quantized:
            summands = [q.float() * scale[:, None] for q, scale in map(quantize_fp8, summands)]
        whole = self._group.all_gather(residual, 0)[: len(x)]
        y, total = add_rms_norm_of_ranks_reference(summands, whole, weight, eps)
        mine = slice(self._group.rank * len(residual), (self._group.rank + 1) * len(residual))
        share = torch.full_like(residual, float("nan"))
        share[: len(total[mine])] = total[mine]
        if own is not None:
            own.fill_(float("nan"))
            own[: len(y[mine])] = y[mine]
        return (*quantize_fp8(y), share) if fp8 else (y, None, share)

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
        special, general = PeerExchange(group, peers, fp8=True), Exchange(group, sequence_parallel=True, fp8=True)
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
        exchange = PeerExchange(group, peers, fp8=True)
        exchange.enter_for(Fp8Input(torch.tensor([0.1])), rows(group.rank, 3, torch.bfloat16), TOKENS)
        assert peers.calls == 0
        assert (exchange.parts, exchange.quantises_first) == (1, False)

    on_ranks(RANKS, work)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("consumer", [None, Fp8Input(), Fp8Input(torch.tensor([0.05]))])
def test_between_two_blocks_it_is_one_call(consumer: Fp8Input | None, fp8: bool) -> None:
    def work(group: ThreadGroup) -> None:
        peers, dtype = ReferencePeers(group, 64), torch.bfloat16
        norm = RmsNorm(Weights(RandomSource(dtype=dtype), torch.device("cpu"), dtype, 0, 1), HIDDEN, 1e-5)
        special, general = PeerExchange(group, peers, fp8=fp8), Exchange(group, sequence_parallel=True, fp8=fp8)
        summand, residual = rows(10 + group.rank, TOKENS, dtype), rows(50 + group.rank, 3, dtype)
        ways = (special, general)
        opened = [way.leave_open([summand.clone()]) for way in ways]
        (found, total), (expected, expected_total) = (
            way.through(norm, consumer, x, residual, TOKENS, keep=True) for way, x in zip(ways, opened, strict=True)
        )
        assert peers.calls == 1
        kept = general.num_kept(TOKENS)
        assert total.isfinite().all()
        assert torch.equal(total[kept:], torch.zeros_like(total[kept:]))
        limit = 0.06 if fp8 else 0.01
        assert relative(total[:kept], expected_total[:kept]) < limit
        assert relative(found.own[:kept], expected.own[:kept]) < limit
        assert len(plain(found.rows)) == TOKENS
        assert relative(plain(found.rows), plain(expected.rows)) < (0.06 if fp8 or consumer else 0.01)

    on_ranks(RANKS, work)


def plain(found: Tensor | QuantizedRows) -> Tensor:
    return found.float() if isinstance(found, Tensor) else found.values.float() * found.scale.reshape(-1, 1)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())
