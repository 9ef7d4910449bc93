"""Norms by both ways: torch, and the kernel (in the interpreter, which cannot round to bf16, where there is no GPU)."""

from __future__ import annotations

import importlib

import pytest
import torch
from katydid_kernels import add_rms_norm, rms_norm

# The package names its ops' functions, which hide the modules of the same names from a plain import statement.
module = importlib.import_module("katydid_kernels.rms_norm")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

# One rounding of the result to the dtype, and fp32 arithmetic on the way.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.fixture(params=["torch", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "_has_kernel", lambda x: request.param == "kernel")
    return str(request.param)


def skip_bf16_in_the_interpreter(way: str, dtype: torch.dtype) -> None:
    if way == "kernel" and dtype == torch.bfloat16 and not CUDA:
        pytest.skip("the interpreter truncates to bf16")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (7, 100), (3, 5, 4096)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, way: str) -> None:
    skip_bf16_in_the_interpreter(way, dtype)
    torch.manual_seed(0)
    x, weight = (3 * torch.randn(shape)).to(DEVICE, dtype), torch.rand(shape[-1]).to(DEVICE, dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=TOLERANCE[dtype])


def test_eps_decides_for_tiny_rows(way: str) -> None:
    x = torch.full((1, 8), 1e-4, device=DEVICE)
    torch.testing.assert_close(rms_norm(x, torch.ones(8, device=DEVICE), 1e-5), x / (1e-8 + 1e-5) ** 0.5)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_rms_norm(dtype: torch.dtype, way: str) -> None:
    skip_bf16_in_the_interpreter(way, dtype)
    torch.manual_seed(1)
    x, residual = (torch.randn(9, 104).to(DEVICE, dtype)[:, :96] for _ in range(2))
    weight = torch.rand(96).to(DEVICE, dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-6))
