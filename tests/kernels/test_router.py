"""The router by its public ops: choices, ties, weights, and an fp32 weight split into bf16 terms."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from katydid_kernels import RouterWeight, add_rms_norm, add_rms_norm_route, router
from katydid_kernels.router import split_into_bf16
from katydid_kernels.router.weight import experts_per_tile

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


def test_a_shared_expert_stands_behind_the_others() -> None:
    x, weight = torch.randn(6, 32), torch.randn(13, 32)
    plain = router(x, weight, top_k=3, scoring="sigmoid", scale=2.5)
    weights, ids = router(x, weight, top_k=3, scoring="sigmoid", scale=2.5, shared=True)
    assert torch.equal(weights[:, :3], plain[0])
    assert torch.equal(ids[:, :3], plain[1])
    assert weights[:, 3].tolist() == [1.0] * 6
    assert ids[:, 3].tolist() == [13] * 6
    assert ids.dtype == torch.int32


def test_no_tokens() -> None:
    weights, ids = router(torch.empty(0, 4), torch.ones(8, 4), top_k=2, scoring="softmax")
    assert weights.shape == ids.shape == (0, 2)


def test_a_prepared_weight_gives_the_same() -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(5, 32), torch.randn(13, 32)
    for found, expected in zip(
        router(x, RouterWeight.prepare(weight), top_k=3, scoring="softmax"),
        router(x, weight, top_k=3, scoring="softmax"),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_three_terms_are_the_weight_and_two_keep_sixteen_bits() -> None:
    torch.manual_seed(3)
    weight = torch.randn(70, 40) * torch.logspace(-12, 12, 40)
    for terms, bound in ((3, 0.0), (2, 2.0**-17)):
        parts = split_into_bf16(weight, terms)
        assert parts.dtype == torch.bfloat16
        assert (parts[:, 70:] == 0).all()
        total = parts.double().sum(0)[:70]
        assert ((total - weight.double()).abs() <= bound * weight.double().abs()).all()


@pytest.mark.parametrize(("experts", "tile"), [(1, 64), (64, 64), (128, 128), (192, 192), (256, 128), (257, 192)])
def test_experts_are_cut_into_few_equal_tiles(experts: int, tile: int) -> None:
    assert experts_per_tile(experts) == tile
    assert split_into_bf16(torch.zeros(experts, 8), 2).shape[1] % tile == 0


def test_bad_input_is_named() -> None:
    x, weight = torch.ones(2, 4), torch.ones(8, 4)
    with pytest.raises(ValueError, match=r"x must be \[T, 4\]"):
        router(x[:, :3], weight, top_k=2, scoring="sigmoid")
    with pytest.raises(ValueError, match="top_k must be 1 to the 8 experts, got 9"):
        router(x, weight, top_k=9, scoring="sigmoid")
    with pytest.raises(ValueError, match=r"selection_bias must be \[8\]"):
        router(x, weight, top_k=2, scoring="sigmoid", selection_bias=torch.ones(7))
    with pytest.raises(ValueError, match="weight must be fp32"):
        RouterWeight.prepare(weight.bfloat16())


@pytest.mark.parametrize("fp8", [False, True])
def test_norm_and_router_in_one_are_the_ops_in_turn(fp8: bool) -> None:
    torch.manual_seed(4)
    x, residual, norm = torch.randn(3, 32), torch.randn(3, 32), torch.rand(32)
    weight = RouterWeight.prepare(torch.randn(13, 32))
    found = add_rms_norm_route(x, residual, norm, 1e-5, weight, top_k=3, scoring="sigmoid", fp8=fp8)
    y, total = add_rms_norm(x, residual, norm, 1e-5)
    assert torch.equal(found.y, y)
    assert torch.equal(found.total, total)
    assert torch.equal(found.ids, router(y, weight, top_k=3, scoring="sigmoid")[1])
    assert (found.q is None, found.q_scale is None) == (not fp8, not fp8)
    with pytest.raises(ValueError, match="x and residual must have one shape"):
        add_rms_norm_route(x, residual[:2], norm, 1e-5, weight, top_k=3, scoring="sigmoid")
