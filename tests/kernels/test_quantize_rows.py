"""Norm and SwiGLU with quantisation against torch, in the interpreter where there is no GPU.

The interpreter does not round to e4m3 as the GPU does; there the kernels write fp16: everything but the last rounding.
"""

from __future__ import annotations

import katydid_kernels.quantize_rows as quantize_rows
import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture(autouse=True)
def _kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the wrappers launch their kernels in the interpreter instead of choosing the reference."""
    if not CUDA:
        monkeypatch.setattr(quantize_rows, "_has_kernels", lambda tensor: True)
        monkeypatch.setattr(quantize_rows, "_E4M3", torch.float16)


def assert_quantised(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    if not CUDA:
        torch.testing.assert_close(found, expected)
        return
    difference = (found.float() - expected.float()).abs()
    assert (difference <= expected.float().abs().clamp(min=2.0**-6) / 8).all()
    assert (difference > 0).float().mean() < 1e-2


@pytest.mark.parametrize(("tokens", "n"), [(1, 64), (5, 100), (3, 4096)])
@pytest.mark.parametrize("static", [False, True])
def test_add_rms_norm(tokens: int, n: int, static: bool) -> None:
    x, residual = torch.randn(tokens, n, device=DEVICE), torch.randn(tokens, n + 4, device=DEVICE)[:, :n]
    weight = torch.rand(n, device=DEVICE)
    scale = torch.tensor([0.02], device=DEVICE) if static else None
    found = quantize_rows.add_rms_norm_quantize(x, residual, weight, 1e-5, scale=scale)
    expected = quantize_rows.add_rms_norm_quantize_reference(x, residual, weight, 1e-5, scale=scale)
    assert torch.equal(found[2], expected[2])
    torch.testing.assert_close(found[1], expected[1])
    assert_quantised(found[0], expected[0])
    plain = [torch.empty(tokens, n, device=DEVICE) for _ in range(2)]
    beside = quantize_rows.add_rms_norm_quantize(x, residual, weight, 1e-5, scale=scale, plain=plain[0])
    quantize_rows.add_rms_norm_quantize_reference(x, residual, weight, 1e-5, scale=scale, plain=plain[1])
    torch.testing.assert_close(*plain)
    assert torch.equal(beside[0], found[0]), "x is fp32: nothing is rounded before it is quantised"


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_eps_decides_for_small_rows(eps: float) -> None:
    """The mean square of a row is 1e-6, so that one eps or the other is a factor of two."""
    x, residual = (7e-4 * torch.randn(5, 256, device=DEVICE) for _ in range(2))
    weight, plain = torch.rand(256, device=DEVICE) + 0.5, torch.empty(5, 256, device=DEVICE)
    found, scales, _ = quantize_rows.add_rms_norm_quantize(x, residual, weight, eps, plain=plain)
    total = x.double() + residual.double()
    expected = total / (total.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    torch.testing.assert_close(plain.double(), expected, rtol=1e-4, atol=1e-6)
    error = found.double() * scales.double().unsqueeze(-1) - expected
    assert error.norm() / expected.norm() < 3.2e-2


@pytest.mark.parametrize(("tokens", "n"), [(1, 64), (7, 96), (37, 192), (32, 192), (3, 1536), (4, 2048)])
@pytest.mark.parametrize("static", [False, True])
def test_swiglu(tokens: int, n: int, static: bool) -> None:
    gate_up = torch.randn(tokens, 2 * n, device=DEVICE)
    scale = torch.tensor([0.01], device=DEVICE) if static else None
    found = quantize_rows.swiglu_quantize(gate_up, scale=scale)
    expected = quantize_rows.swiglu_quantize_reference(gate_up, scale=scale)
    torch.testing.assert_close(found[1], expected[1])
    assert_quantised(found[0], expected[0])


@pytest.mark.parametrize(("tokens", "n"), [(1, 64), (7, 100), (37, 128), (3, 4096)])
@pytest.mark.parametrize("static", [False, True])
def test_plain_rows(tokens: int, n: int, static: bool) -> None:
    x = torch.randn(tokens, n + 8, device=DEVICE)[:, :n]
    scale = torch.tensor([0.01], device=DEVICE) if static else None
    found = quantize_rows.quantize_fp8(x, scale=scale)
    expected = quantize_rows.quantize_fp8_reference(x, scale=scale)
    torch.testing.assert_close(found[1], expected[1])
    assert_quantised(found[0], expected[0])


def test_values_out_of_range_are_clamped_and_rows_of_zeros_stay_zero() -> None:
    gate_up = torch.zeros(2, 64, device=DEVICE)
    gate_up[0] = 100.0
    q, _ = quantize_rows.swiglu_quantize(gate_up, scale=torch.tensor([1.0], device=DEVICE))
    assert (q[0].float() == 448).all()
    q, scale = quantize_rows.swiglu_quantize(gate_up)
    assert (q[1].float() == 0).all()
    assert scale[1] > 0
    assert q[0].float().max() == 448


def test_no_tokens() -> None:
    assert quantize_rows.swiglu_quantize(torch.empty(0, 64, device=DEVICE))[0].shape == (0, 32)


@pytest.mark.parametrize(("tokens", "n", "group"), [(1, 128, 128), (5, 384, 128), (3, 256, 64)])
def test_one_scale_a_group(tokens: int, n: int, group: int) -> None:
    x, gate_up = torch.randn(tokens, n, device=DEVICE), torch.randn(tokens, 2 * n, device=DEVICE)
    weight = torch.rand(n, device=DEVICE)
    pairs = [
        (quantize_rows.quantize_fp8(x, group=group), quantize_rows.quantize_fp8_reference(x, group=group)),
        (
            quantize_rows.swiglu_quantize(gate_up, group=group),
            quantize_rows.swiglu_quantize_reference(gate_up, group=group),
        ),
        (
            quantize_rows.add_rms_norm_quantize(x, x, weight, 1e-5, group=group),
            quantize_rows.add_rms_norm_quantize_reference(x, x, weight, 1e-5, group=group),
        ),
    ]
    for found, expected in pairs:
        assert found[1].shape == (tokens, n // group)
        torch.testing.assert_close(found[1], expected[1])
        assert_quantised(found[0], expected[0])
    # The largest value of every group is what its scale makes 448.
    largest = pairs[0][0][0].float().abs().view(tokens, -1, group).amax(-1)
    assert ((largest - 448).abs() < 1).all()


@pytest.mark.parametrize(("n", "group"), [(64, 128), (96, 48), (64, 0)])
def test_a_group_that_does_not_fit(n: int, group: int) -> None:
    with pytest.raises(ValueError, match="group must be a power of two"):
        quantize_rows.quantize_fp8(torch.zeros(2, n, device=DEVICE), group=group)


def test_group_and_scale() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        quantize_rows.quantize_fp8(torch.zeros(2, 64, device=DEVICE), scale=torch.ones(1, device=DEVICE), group=64)
