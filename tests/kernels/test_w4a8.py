"""W4A8 products against float64, on whatever device there is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from katydid_kernels import fused_moe_w4a8, linear_w4a8, pack_int4, quantize_fp8, quantize_int4
from katydid_kernels.w4a8.packing import Int4Weight, dequantize_int4, unpack_int4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3 = torch.float8_e4m3fn


def packed(*shape: int, gated: bool = False) -> tuple[Int4Weight, torch.Tensor]:
    """A random weight and its exact value in float64."""
    codes, scales = quantize_int4(torch.randn(*shape, device=DEVICE) / shape[-1] ** 0.5)
    return pack_int4(codes, scales, gated=gated), dequantize_int4(codes, scales).double()


@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 64, 128), (7, 96, 320), (70, 200, 192), (5, 33, 48)])
@pytest.mark.parametrize("hooks", [False, True])
def test_linear(tokens: int, n: int, k: int, hooks: bool) -> None:
    weight, exact = packed(n, k)
    x = torch.randn(tokens, k, device=DEVICE).to(E4M3)
    scale = torch.rand(tokens if hooks else 1, device=DEVICE) + 0.5
    bias = torch.randn(n, device=DEVICE).bfloat16() if hooks else None
    residual = torch.randn(tokens, n, device=DEVICE).bfloat16() if hooks else None
    y = linear_w4a8(x, weight, scale, bias=bias, residual=residual)
    expected = x.double() @ exact.T * scale.double()[:, None]
    if bias is not None and residual is not None:
        expected = expected + bias.double() + residual.double()
    assert y.dtype == torch.bfloat16
    assert (y.double() - expected).norm() / expected.norm() < 2.5e-3


@pytest.mark.parametrize("tokens", [1, 8, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_not_yet_quantised(tokens: int, dtype: torch.dtype) -> None:
    """They become what `quantize_fp8` makes of them: bit for bit, but for fp32 on a GPU, where another kernel sums."""
    weight, _ = packed(72, 320)
    x = 3 * torch.randn(tokens, 320, device=DEVICE, dtype=dtype)
    values, scale = quantize_fp8(x)
    found, expected = linear_w4a8(x, weight), linear_w4a8(values, weight, scale)
    if dtype == torch.bfloat16 or DEVICE != "cuda":
        assert torch.equal(found, expected)
    assert (found.double() - expected.double()).norm() / expected.double().norm() < 4e-3


EXPERTS, HIDDEN, WIDTH, TOP_K = 6, 256, 192, 3


@pytest.mark.parametrize("tokens", [0, 1, 9, 80])
def test_experts(tokens: int) -> None:
    torch.manual_seed(tokens)
    w13, exact13 = packed(EXPERTS, 2 * WIDTH, HIDDEN, gated=True)
    w2, exact2 = packed(EXPERTS, HIDDEN, WIDTH)
    x = torch.randn(tokens, HIDDEN, device=DEVICE).to(E4M3)
    x_scale, h_scale = torch.rand(tokens, device=DEVICE) + 0.5, torch.full((1,), 1 / 64, device=DEVICE)
    # Two ids on either side of the range belong to other ranks.
    ids = torch.rand(tokens, EXPERTS + 4, device=DEVICE).topk(TOP_K).indices.int()
    weights, shared = torch.rand(tokens, TOP_K, device=DEVICE), torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
    found = fused_moe_w4a8(
        x, w13, w2, weights, ids, x_scale, h_scale, first_expert=2, shared_output=shared
    )  # fmt: skip
    expected = shared.double()
    for token in range(tokens):
        for weight, expert in zip(weights[token].double(), (ids[token] - 2).tolist(), strict=True):
            if 0 <= expert < EXPERTS:
                gate, up = (exact13[expert] @ (x[token].double() * x_scale[token].double())).chunk(2)
                h = (F.silu(gate) * up / h_scale).float().clamp(-448, 448).to(E4M3).double() * h_scale
                expected[token] += weight * (exact2[expert] @ h)
    assert found.dtype == torch.bfloat16
    # A tie of e4m3 can fall either way: hence the wider bound.
    assert tokens == 0 or (found.double() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernels of few and of many pairs round the summands differently")
def test_a_token_does_not_depend_on_its_batch() -> None:
    (w13, _), (w2, _) = packed(EXPERTS, 2 * WIDTH, HIDDEN, gated=True), packed(EXPERTS, HIDDEN, WIDTH)
    x = torch.randn(11, HIDDEN, device=DEVICE).to(E4M3)
    ids, one = torch.rand(11, EXPERTS, device=DEVICE).topk(2).indices.int(), torch.ones(1, device=DEVICE)
    weights = torch.rand(11, 2, device=DEVICE)
    whole = fused_moe_w4a8(x, w13, w2, weights, ids, one, one)
    for t in range(11):
        rows = slice(t, t + 1)
        assert torch.equal(fused_moe_w4a8(x[rows], w13, w2, weights[rows], ids[rows], one, one)[0], whole[t])


def test_packed_weights_survive_a_state_dict() -> None:
    weight, exact = packed(EXPERTS, HIDDEN, WIDTH)
    again = Int4Weight(weight.codes.clone(), weight.scales.clone(), HIDDEN, WIDTH)
    assert torch.equal(dequantize_int4(*unpack_int4(again)).double(), exact)


def test_errors_name_the_field() -> None:
    weight, _ = packed(64, 128)
    x, one = torch.zeros(2, 128, device=DEVICE).to(E4M3), torch.ones(1, device=DEVICE)
    with pytest.raises(ValueError, match=r"x must be .* got torch.float32 \(2, 128\) with a scale"):
        linear_w4a8(x.float(), weight, one)
    with pytest.raises(ValueError, match=r"x must be .* got torch.float8_e4m3fn \(2, 128\) without a scale"):
        linear_w4a8(x, weight)
    with pytest.raises(ValueError, match=r"weight must be one packed \[out, 64\] matrix"):
        linear_w4a8(x[:, :64], weight, one)
    with pytest.raises(ValueError, match="x_scale must be fp32 with 1 or 2 elements"):
        linear_w4a8(x, weight, torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match=r"bias must be \[64\]"):
        linear_w4a8(x, weight, one, bias=torch.ones(3, device=DEVICE))
    (w13, _), (w2, _) = packed(2, 128, 128, gated=True), packed(2, 128, 64)
    ids, weights = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE), torch.ones(2, 1, device=DEVICE)
    with pytest.raises(ValueError, match="w13 must be packed gated experts"):
        fused_moe_w4a8(x, w2, w2, weights, ids, one, one)
    with pytest.raises(ValueError, match="h_scale must be fp32 with 1 elements"):
        fused_moe_w4a8(x, w13, w2, weights, ids, one, torch.ones(2, device=DEVICE))
    with pytest.raises(ValueError, match="topk_ids must be int32"):
        fused_moe_w4a8(x, w13, w2, weights, ids.long(), one, one)


@pytest.mark.skipif(DEVICE == "cuda", reason="ids on a GPU are not read")
@pytest.mark.parametrize(("wrong", "total", "message"), [(-1, None, "got -1"), (2, 2, r"in \[0, 2\), got 2")])
def test_ids_out_of_range_on_the_host(wrong: int, total: int | None, message: str) -> None:
    (w13, _), (w2, _) = packed(2, 128, 128, gated=True), packed(2, 128, 64)
    x, one = torch.zeros(2, 128).to(E4M3), torch.ones(1)
    ids, weights = torch.tensor([[0], [wrong]], dtype=torch.int32), torch.ones(2, 1)
    with pytest.raises(ValueError, match=message):
        fused_moe_w4a8(x, w13, w2, weights, ids, one, one, num_experts=total)
