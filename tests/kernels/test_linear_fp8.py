"""Linear layers in e4m3 against float64: scales of segments and blocks, bias and residual, errors by name."""

from __future__ import annotations

import pytest
import torch
from katydid_kernels.linear_fp8 import linear_fp8, segment_scale

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_each_segment_keeps_its_scale(tokens: int) -> None:
    sizes = [64, 16, 16]
    x, weight = torch.randn(tokens, 256, device=DEVICE).to(E4M3), torch.randn(96, 256, device=DEVICE).to(E4M3)
    x_scale, scales = torch.rand(tokens, device=DEVICE) + 0.5, torch.tensor([0.5, 3.0, 40.0], device=DEVICE)
    y = linear_fp8(x, weight, x_scale, segment_scale(scales, sizes))
    start = 0
    for size, scale in zip(sizes, scales.tolist(), strict=True):
        part = x.double() @ weight[start : start + size].double().T * x_scale.double()[:, None] * scale
        error = (y[:, start : start + size].double() - part).norm() / part.norm()
        assert error < 3e-3
        start += size


def test_bias_and_residual() -> None:
    x, weight = torch.randn(5, 128, device=DEVICE).to(E4M3), torch.randn(32, 128, device=DEVICE).to(E4M3)
    one = torch.ones(1, device=DEVICE)
    bias, residual = torch.randn(32, device=DEVICE).bfloat16(), torch.randn(5, 32, device=DEVICE).bfloat16()
    y = linear_fp8(x, weight, one, one, bias=bias, residual=residual)
    expected = x.double() @ weight.double().T + bias.double() + residual.double()
    assert (y.double() - expected).norm() / expected.norm() < 3e-3


def test_empty() -> None:
    one = torch.ones(1, device=DEVICE)
    empty, weight = torch.empty(0, 128, device=DEVICE).to(E4M3), torch.zeros(32, 128, device=DEVICE).to(E4M3)
    assert linear_fp8(empty, weight, one, one).shape == (0, 32)


def test_errors_name_the_field() -> None:
    x, one = torch.zeros(2, 128, device=DEVICE).to(E4M3), torch.ones(1, device=DEVICE)
    with pytest.raises(ValueError, match="weight must be float8_e4m3fn"):
        linear_fp8(x, torch.zeros(4, 128, device=DEVICE), one, one)
    with pytest.raises(ValueError, match="share K"):
        linear_fp8(x, torch.zeros(4, 64, device=DEVICE).to(E4M3), one, one)
    with pytest.raises(ValueError, match="row_scale must be fp32 with 1 or 2 elements"):
        linear_fp8(x, x, torch.ones(3, device=DEVICE), one)
    with pytest.raises(ValueError, match="one element for each of 2 parts"):
        segment_scale(one, [1, 2])


@pytest.mark.parametrize(("tokens", "out"), [(1, 128), (7, 200), (130, 384)])
def test_scales_of_blocks(tokens: int, out: int) -> None:
    x, weight = torch.randn(tokens, 256, device=DEVICE).to(E4M3), torch.randn(out, 256, device=DEVICE).to(E4M3)
    x_scale = torch.rand(tokens, 2, device=DEVICE) + 0.5
    weight_scale = torch.rand(-(-out // 128), 2, device=DEVICE) + 0.5
    y = linear_fp8(x, weight, x_scale, weight_scale)
    expected = torch.zeros(tokens, out, dtype=torch.float64, device=DEVICE)
    for k in range(2):
        part = x[:, 128 * k :][:, :128].double() @ weight[:, 128 * k :][:, :128].double().T
        blocks = weight_scale[:, k].double().repeat_interleave(128)[:out]
        expected += part * x_scale[:, k, None].double() * blocks
    assert (y.double() - expected).norm() / expected.norm() < 3e-3


def test_block_scales_that_do_not_fit() -> None:
    x, one = torch.zeros(2, 256, device=DEVICE).to(E4M3), torch.ones(1, 1, device=DEVICE)
    with pytest.raises(ValueError, match=r"row_scale must be fp32 \[2, 2\]"):
        linear_fp8(x, x, one, torch.ones(1, 2, device=DEVICE))
    with pytest.raises(ValueError, match=r"col_scale must be fp32 \[1, 2\]"):
        linear_fp8(x, x, torch.ones(2, 2, device=DEVICE), one)
    with pytest.raises(ValueError, match="K a multiple of 128"):
        linear_fp8(x[:, :96], x[:, :96], one, one)
