from __future__ import annotations

import pytest
import torch
from katydid_kernels import add_rms_norm, rms_norm

# One rounding of the result to the dtype, and fp32 arithmetic on the way.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (7, 100), (3, 5, 4096)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (3 * torch.randn(shape)).to(dtype), torch.rand(shape[-1]).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=TOLERANCE[dtype])


def test_eps_decides_for_tiny_rows() -> None:
    x = torch.full((1, 8), 1e-4)
    torch.testing.assert_close(rms_norm(x, torch.ones(8), 1e-5), x / (1e-8 + 1e-5) ** 0.5)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, residual, weight = torch.randn(9, 96).to(dtype), torch.randn(9, 96).to(dtype), torch.rand(96).to(dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-6))
