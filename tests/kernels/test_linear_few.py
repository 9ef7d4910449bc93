"""One or two rows against fp8 weights, in the interpreter where there is no GPU.

The interpreter does not round to e4m3 as the GPU does: there x comes quantised, or as numbers that e4m3 has.
"""

from __future__ import annotations

import importlib

import pytest
import torch

module = importlib.import_module("katydid_kernels.linear_few")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_kernel", lambda x: True)


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 40, 4096), (2, 33, 1024), (1, 5, 1664), (2, 7, 8192), (1, 300, 64)])
@pytest.mark.parametrize("per_token", [False, True])
def test_quantised_rows(rows: int, n: int, k: int, per_token: bool) -> None:
    torch.manual_seed(n)
    x, weight = torch.randn(rows, k, device=DEVICE).to(E4M3), torch.randn(n, k, device=DEVICE).to(E4M3)
    x_scale = torch.rand(rows if per_token else 1, device=DEVICE) + 0.5
    weight_scale = torch.rand(n if per_token else 1, device=DEVICE)
    bias = torch.randn(n, device=DEVICE) if per_token else None
    options = {"x_scale": x_scale, "bias": bias, "out_dtype": torch.float32}
    found = module.linear_few(x, weight, weight_scale, **options, overlap=CUDA)
    expected = module.linear_few_reference(x, weight, weight_scale, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("static", [False, True])
def test_plain_rows_are_quantised(static: bool) -> None:
    torch.manual_seed(3)
    if CUDA:
        x = torch.randn(2, 1024, device=DEVICE)
    else:
        x = torch.randn(2, 1024).to(E4M3).float()
        x[:, 0] = 448.0
    x_scale = torch.ones(1, device=DEVICE) if static else None
    weight, weight_scale = torch.randn(50, 1024, device=DEVICE).to(E4M3), torch.rand(50, device=DEVICE)
    options = {"x_scale": x_scale, "out_dtype": torch.float32}
    found = module.linear_few(x, weight, weight_scale, **options, overlap=CUDA)
    expected = module.linear_few_reference(x, weight, weight_scale, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-3)


def test_a_scale_must_be_given() -> None:
    x = torch.zeros(1, 64, device=DEVICE).to(E4M3)
    with pytest.raises(ValueError, match="x_scale must be given"):
        module.linear_few(x, x, torch.ones(1, device=DEVICE))
