"""Bounds over draws, of results that a CPU makes as the kernels do: two roundings of h by sums of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.kernels.e4m3_draws import assert_error

BOUND = 1.5e-2
WIDTH, HIDDEN, CHOICES = 192, 192, 8


def rounded(gate: Tensor, up: Tensor) -> Tensor:
    return (silu(gate) * up * 16).clamp(-448, 448).to(torch.float8_e4m3fn).double() / 16


def drawn(fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None) -> float:
    """Of one token's result, whose gate and up have the error of sums that are promoted every 128 products."""
    gate, up = torch.randn(2, CHOICES, WIDTH).double()
    w2, shared, weights = (
        torch.randn(CHOICES, WIDTH, HIDDEN).double() / WIDTH**0.5,
        torch.randn(HIDDEN),
        torch.rand(CHOICES),
    )
    noisy = [value + 2.5e-4 * torch.randn_like(value) for value in (gate, up)]
    h, used = rounded(*noisy), weights
    if fault:
        h, used = fault(h, used)
    out, reference = (
        shared + torch.einsum("k,kw,kwh->h", factors.double(), values, w2)
        for factors, values in ((used, h), (weights, rounded(gate, up)))
    )
    return float((out.bfloat16().double() - reference).norm() / reference.norm())


def test_ties_alone_pass() -> None:
    torch.manual_seed(0)
    for _ in range(60):
        assert_error(drawn, BOUND, tokens=1)


def scaled(h: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return h * 1.04, weights


def last_columns_missing(h: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([h[:, :-2], 0 * h[:, -2:]], dim=1), weights


def a_choice_missing(h: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return h, weights * (weights != weights[3])


def neighbours_weights(h: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return h, weights.roll(1)


@pytest.mark.parametrize("fault", [scaled, last_columns_missing, a_choice_missing, neighbours_weights])
def test_a_fault_is_seen(fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        with pytest.raises(AssertionError):
            assert_error(partial(drawn, fault), BOUND, tokens=1)


def test_no_draw_may_be_worse_than_ties_make_it() -> None:
    errors = iter([0.001, 0.001, 0.5, 0.001, 0.001])
    with pytest.raises(AssertionError):
        assert_error(lambda: next(errors), BOUND, tokens=8)


def test_many_tokens_are_drawn_once() -> None:
    with pytest.raises(AssertionError):
        assert_error(iter([0.016]).__next__, BOUND, tokens=9)
