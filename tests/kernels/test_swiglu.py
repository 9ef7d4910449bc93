"""SwiGLU by both ways: torch, and the kernel (in the interpreter, without rounding to bf16, where there is no GPU)."""

from __future__ import annotations

import importlib

import pytest
import torch
from katydid_kernels import swiglu

# The package names its ops' functions, which hide the modules of the same names from a plain import statement.
module = importlib.import_module("katydid_kernels.swiglu")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# One rounding of the result to the dtype, and fp32 arithmetic on the way.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("way", ["torch", "kernel"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "n"), [(0, 64), (1, 64), (7, 100), (3, 2500)])
def test_swiglu(tokens: int, n: int, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "kernel" and dtype == torch.bfloat16 and not CUDA:
        pytest.skip("the interpreter truncates to bf16")
    monkeypatch.setattr(module, "_has_kernel", lambda gate_up: way == "kernel")
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(tokens, 2 * n + 8)).to(DEVICE, dtype)[:, : 2 * n]
    gate, up = gate_up.double().chunk(2, dim=-1)
    found = swiglu(gate_up)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), gate * torch.sigmoid(gate) * up, atol=1e-6, rtol=TOLERANCE[dtype])


def test_large_gates_do_not_overflow() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 3.0]], device=DEVICE)
    torch.testing.assert_close(swiglu(gate_up), torch.tensor([[-0.0, 3e4]], device=DEVICE))
