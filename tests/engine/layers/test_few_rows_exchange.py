"""Sums by peers' kernels against the general exchange: the same rows, quantised where their consumer wants them so."""

from __future__ import annotations

import pytest
import torch
from katydid_engine.layers.activations import Fp8Input, QuantizedRows
from katydid_engine.layers.exchange import Exchange, Summand
from katydid_engine.layers.few_rows_exchange import FewRowsExchange
from katydid_engine.layers.norm import RmsNorm
from katydid_engine.weights import RandomSource, Weights
from katydid_kernels import quantize_fp8
from katydid_kernels.peer_reduce import add_rms_norm_of_ranks_reference
from torch import Tensor

from tests.engine.thread_group import ThreadGroup, on_ranks

RANKS, HIDDEN = 4, 32


class ReferencePeers:
    """What the kernels are defined by, over a group of threads."""

    few_tokens = 8

    def __init__(self, group: ThreadGroup) -> None:
        self._group = group
        self.calls = 0

    def sum_few(self, x: Tensor, *, overlap: bool = False) -> Tensor:
        self.calls += 1
        return torch.stack([part.float() for part in self._group.all_gather(x, 0).chunk(RANKS)]).sum(0).to(x.dtype)

    def all_reduce_few(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, fp8: bool = False, overlap: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        self.calls += 1
        summands = list(self._group.all_gather(x, 0).chunk(RANKS))
        y, total = add_rms_norm_of_ranks_reference(summands, residual, weight, eps)
        return (*quantize_fp8(y), total) if fp8 else (y, None, total)


def rows(seed: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(dtype: torch.dtype) -> RmsNorm:
    return RmsNorm(Weights(RandomSource(dtype=dtype), torch.device("cpu"), dtype, 0, 1), HIDDEN, 1e-5)


@pytest.mark.parametrize("consumer", [None, Fp8Input(), Fp8Input(torch.tensor([0.05]))])
@pytest.mark.parametrize(
    ("tokens", "dtype", "calls"), [(8, torch.bfloat16, 2), (9, torch.bfloat16, 0), (3, torch.float32, 0)]
)
def test_the_same_rows_come_out(tokens: int, dtype: torch.dtype, calls: int, consumer: Fp8Input | None) -> None:
    def work(group: ThreadGroup) -> None:
        peers, gain = ReferencePeers(group), norm(dtype)
        special, general = FewRowsExchange(group, peers), Exchange(group, sequence_parallel=False)
        summand, residual = rows(group.rank, tokens, dtype), rows(99, tokens, dtype)
        torch.testing.assert_close(special.leave(summand), general.leave(summand.clone()), atol=0.02, rtol=0.02)
        opened = special.leave_open([summand])
        assert isinstance(opened, Summand) == (calls > 0)
        found, total = special.add_for(gain, consumer, opened, residual)
        expected, expected_total = general.add_for(gain, consumer, general.leave_open([summand.clone()]), residual)
        torch.testing.assert_close(total, expected_total, atol=0.02, rtol=0.02)
        assert type(found) is type(expected)
        if isinstance(found, QuantizedRows) and isinstance(expected, QuantizedRows):
            found, expected = (rows.values.float() * rows.scale.reshape(-1, 1) for rows in (found, expected))
        assert (found - expected).norm() < (0.06 if consumer else 0.01) * expected.norm()
        assert peers.calls == calls

    on_ranks(RANKS, work)
