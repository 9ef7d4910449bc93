"""The experts that the benchmarks draw are typical, and the same in every process."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.expert_draws import TOP_K, draw_ids, typical_error


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)


def expected(tokens: int, experts: int) -> float:
    return experts * (1 - (1 - TOP_K / experts) ** tokens)


@pytest.mark.parametrize("experts", [24, 128, 192])
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 256, 2048])
def test_as_many_experts_as_is_to_be_expected(tokens: int, experts: int) -> None:
    draws = draw_ids(tokens, experts)
    assert len(draws) == (12 if tokens <= 4 else 1)
    for ids in draws:
        assert ids.shape == (tokens, TOP_K)
        assert ids.dtype == torch.int32
        assert all(len(set(row)) == TOP_K for row in ids.tolist())
        assert len(set(ids.flatten().tolist())) == round(expected(tokens, experts))
    assert all(torch.equal(*pair) for pair in zip(draws, draw_ids(tokens, experts), strict=True))


def test_many_tokens_repeat() -> None:
    (ids,) = draw_ids(8192, 192)
    assert ids.shape == (8192, TOP_K)
    assert torch.equal(ids, ids[:2048].repeat(4, 1))


def test_few_tokens_are_checked_five_times() -> None:
    errors = iter([0.03, 0.001, 0.002, 0.003, 0.02, 0.5])
    assert typical_error(lambda: next(errors), tokens=8) == 0.003
    assert typical_error(lambda: next(errors), tokens=9) == 0.5
