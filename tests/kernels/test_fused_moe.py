"""Routed experts against a loop over tokens and choices: ranks, ids, scales, and errors by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from katydid_kernels import ExpertScales, fused_moe, swiglu
from torch import Tensor

EXPERTS, HIDDEN, WIDTH, TOP_K = 6, 24, 20, 3


@pytest.fixture(scope="module")
def case() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(13, HIDDEN),
        "w13": torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 5,
        "w2": torch.randn(EXPERTS, HIDDEN, WIDTH) / 5,
        "topk_weights": torch.rand(13, TOP_K),
        "topk_ids": torch.rand(13, EXPERTS).topk(TOP_K).indices.to(torch.int32),
    }


def by_token(case: dict[str, Tensor]) -> Tensor:
    """One token and one choice at a time, in double precision."""
    out = torch.zeros(len(case["x"]), HIDDEN, dtype=torch.float64)
    for token, x in enumerate(case["x"].double()):
        for weight, expert in zip(case["topk_weights"][token], case["topk_ids"][token].tolist(), strict=True):
            gate, up = (case["w13"][expert].double() @ x).chunk(2)
            out[token] += weight.double() * (case["w2"][expert].double() @ (F.silu(gate) * up))
    return out


def test_against_one_token_at_a_time(case: dict[str, Tensor]) -> None:
    torch.testing.assert_close(fused_moe(**case).double(), by_token(case), atol=1e-5, rtol=1e-5)


def test_shared_output_is_added(case: dict[str, Tensor]) -> None:
    shared = torch.randn(13, HIDDEN)
    found = fused_moe(**case, shared_output=shared)
    torch.testing.assert_close(found.double(), by_token(case) + shared.double(), atol=1e-5, rtol=1e-5)


def test_ranks_of_experts_add_up(case: dict[str, Tensor]) -> None:
    parts = [
        fused_moe(
            **case | {"w13": case["w13"][first : first + 2], "w2": case["w2"][first : first + 2]}, first_expert=first
        )
        for first in (0, 2, 4)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(0).double(), by_token(case), atol=1e-5, rtol=1e-5)


def test_bf16_rounds_once_at_the_end(case: dict[str, Tensor]) -> None:
    half = {name: tensor.to(torch.bfloat16) for name, tensor in case.items() if name in ("x", "w13", "w2")}
    rounded = case | {name: tensor.float() for name, tensor in half.items()}
    found = fused_moe(**case | half)
    assert found.dtype == torch.bfloat16
    # Between the products the hidden row is bf16: its 8 bits bound the error of a sum of 20 terms near 1.
    torch.testing.assert_close(found.double(), by_token(rounded), atol=0.03, rtol=0.02)


@pytest.mark.parametrize("per_token", [False, True])
def test_fp8_rounds_rows_and_hidden_rows_alone(case: dict[str, Tensor], per_token: bool) -> None:
    """Against the product of the dequantised weights, token by token; h has 4 bits, which average out over the sum."""
    half = {name: case[name].to(torch.float8_e4m3fn) for name in ("x", "w13", "w2")}
    token = torch.rand(13) + 0.5 if per_token else None
    up, down, h_scale = torch.rand(EXPERTS, 2) + 0.5, torch.rand(EXPERTS) + 0.5, 1 / 16
    scales = ExpertScales(up, down * h_scale, torch.tensor([1 / h_scale]), token)
    wide = case | {
        "x": half["x"].float() * (1.0 if token is None else token[:, None]),
        "w13": half["w13"].float() * up.repeat_interleave(WIDTH, 1)[:, :, None],
        "w2": half["w2"].float() * down[:, None, None],
    }
    found, expected = fused_moe(**case | half, scales=scales), by_token(wide)
    assert found.dtype == torch.bfloat16
    error = (found.double() - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.03


def test_a_token_does_not_depend_on_its_batch(case: dict[str, Tensor]) -> None:
    whole = fused_moe(**case)
    for token in range(13):
        one = {name: case[name][token : token + 1] for name in ("x", "topk_weights", "topk_ids")}
        assert torch.equal(fused_moe(**case | one)[0], whole[token])


def test_no_tokens(case: dict[str, Tensor]) -> None:
    none = {name: case[name][:0] for name in ("x", "topk_weights", "topk_ids")}
    assert fused_moe(**case | none).shape == (0, HIDDEN)


def test_swiglu() -> None:
    x = torch.tensor([[-200.0, -1.0, 0.0, 2.0, 200.0, 3.0, 2.0, 1.0, 0.5, 1.0]])
    expected = F.silu(x[:, :5]) * x[:, 5:]
    torch.testing.assert_close(swiglu(x), expected)
    assert swiglu(x.to(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("width", [1, 13, 20])
def test_swiglu_of_a_row_does_not_depend_on_its_batch(width: int) -> None:
    x = torch.randn(40, 2 * width)
    whole = swiglu(x)
    for row in range(40):
        assert torch.equal(swiglu(x[row : row + 1])[0], whole[row])


def test_scales_of_blocks() -> None:
    """Against the dequantised product in fp64; h is quantised by the largest of its 128 columns."""
    torch.manual_seed(1)
    experts, hidden, width, tokens = 3, 256, 128, 5
    x, w13, w2 = (
        torch.randn(*shape).to(torch.float8_e4m3fn)
        for shape in ((tokens, hidden), (experts, 2 * width, hidden), (experts, hidden, width))
    )
    scales = ExpertScales(
        (torch.rand(experts, 2, 2) + 0.5) / 16,
        torch.rand(experts, 2, 1) + 0.5,
        torch.ones(1),
        torch.rand(tokens, 2) + 0.5,
    )
    assert scales.token is not None
    routed = {"topk_weights": torch.rand(tokens, 2), "topk_ids": torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])}
    found = fused_moe(x, w13, w2, routed["topk_weights"], routed["topk_ids"].int(), scales=scales)
    wide = {
        "x": x.float() * scales.token.repeat_interleave(128, 1),
        "w13": w13.float() * scales.up.repeat_interleave(128, 1).repeat_interleave(128, 2),
        "w2": w2.float() * scales.down.repeat_interleave(128, 1).repeat_interleave(128, 2),
    }
    out = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for weight, expert in zip(routed["topk_weights"][token], routed["topk_ids"][token].tolist(), strict=True):
            gate, up = (wide["w13"][expert].double() @ wide["x"][token].double()).chunk(2)
            out[token] += weight.double() * (wide["w2"][expert].double() @ (F.silu(gate) * up))
    # One rounding of h to 4 bits, averaged over 128 terms.
    assert 1e-3 < (found.double() - out).norm() / out.norm() < 0.04


@pytest.mark.parametrize(("ids", "total", "message"), [(-1, None, r"got -1"), (6, 6, r"\[0, 6\), got 6")])
def test_ids_out_of_range_on_the_host(case: dict[str, Tensor], ids: int, total: int | None, message: str) -> None:
    wrong = case["topk_ids"].clone()
    wrong[3, 1] = ids
    with pytest.raises(ValueError, match=message):
        fused_moe(**case | {"topk_ids": wrong}, num_experts=total)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(13, 7)}, r"x must be \[T, 24\]"),
        ({"w13": torch.zeros(6, 7, 24)}, r"w13 must be \[6, 40, 24\]"),
        ({"topk_weights": torch.zeros(12, 3)}, r"must be \[13, top_k\]"),
    ],
)
def test_shapes_that_do_not_fit(case: dict[str, Tensor], change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_moe(**case | change)


def test_block_scales_that_do_not_fit() -> None:
    x, w13, w2 = torch.zeros(2, 128), torch.zeros(1, 256, 128), torch.zeros(1, 128, 128)
    routed = (torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32))
    up, down, token = torch.ones(1, 2, 1), torch.ones(1, 1, 1), torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"scales.down must be fp32 \[1, 1, 1\]"):
        fused_moe(x, w13, w2, *routed, scales=ExpertScales(up, torch.ones(1), torch.ones(1), token))
    narrow = ExpertScales(up, down, torch.ones(1), token)
    with pytest.raises(ValueError, match="multiples of 128"):
        fused_moe(x, w13[:, :128], w2[:, :, :64], *routed, scales=narrow)
