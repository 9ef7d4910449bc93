from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from katydid_kernels import router

Scoring = Literal["sigmoid", "softmax"]


def scalar_router(
    logits: list[float], bias: list[float], top_k: int, scoring: Scoring, renormalise: bool, scale: float
) -> tuple[list[int], list[float]]:
    """The formula in double precision, ties to the lower expert."""
    if scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    ids = sorted(range(len(logits)), key=lambda e: (-(scores[e] + bias[e]), e))[:top_k]
    weights = [scores[e] for e in ids]
    if renormalise:
        weights = [w / (sum(weights) + 1e-20) for w in weights]
    return ids, [w * scale for w in weights]


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_against_scalars(scoring: Scoring, renormalise: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(50, 32), torch.randn(24, 32), 0.5 * torch.randn(24)
    weights, ids = router(
        x, weight, top_k=5, scoring=scoring, selection_bias=bias, renormalise=renormalise, scale=2.826
    )
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    logits = x.double() @ weight.double().T
    for token in range(50):
        expected = scalar_router(logits[token].tolist(), bias.tolist(), 5, scoring, renormalise, 2.826)
        assert ids[token].tolist() == expected[0]
        torch.testing.assert_close(weights[token].double(), torch.tensor(expected[1]).double(), atol=1e-5, rtol=1e-5)


def test_bias_chooses_but_does_not_weigh() -> None:
    x, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [1.0], [0.0], [-1.0]])
    bias = torch.tensor([-5.0, 0.0, 0.0, 5.0])
    weights, ids = router(x, weight, top_k=2, scoring="sigmoid", selection_bias=bias, renormalise=False)
    assert ids.tolist() == [[3, 1]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[-1.0, 1.0]])))


def test_ties_go_to_the_lower_expert() -> None:
    _, ids = router(torch.ones(3, 4), torch.ones(192, 4), top_k=8, scoring="sigmoid")
    assert ids.tolist() == [list(range(8))] * 3


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_a_token_does_not_depend_on_its_batch(scoring: Scoring) -> None:
    x, weight = torch.randn(40, 32), torch.randn(13, 32)
    whole, _ = router(x, weight, top_k=3, scoring=scoring)
    for token in range(40):
        assert torch.equal(router(x[token : token + 1], weight, top_k=3, scoring=scoring)[0][0], whole[token])


def test_low_precision_input_is_scored_in_fp32() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(20, 64).to(torch.bfloat16), torch.randn(16, 64)
    for found, expected in zip(
        router(x, weight, top_k=4, scoring="sigmoid"),
        router(x.float(), weight, top_k=4, scoring="sigmoid"),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_no_tokens() -> None:
    weights, ids = router(torch.empty(0, 4), torch.ones(8, 4), top_k=2, scoring="softmax")
    assert weights.shape == ids.shape == (0, 2)
