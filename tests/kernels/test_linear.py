"""The reference's promise: the bits of a row do not depend on how many rows stand beside it."""

from __future__ import annotations

import pytest
import torch
from katydid_kernels.linear import linear, linear_unrounded


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 192), (100, 37), (576, 1536)])
def test_rows_do_not_depend_on_their_number(in_size: int, out_size: int, threads: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(300, in_size), torch.randn(out_size, in_size), torch.randn(out_size)
    torch.set_num_threads(threads)
    try:
        whole = linear(x, weight, bias)
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 13, 17, 31, 100):
            assert torch.equal(linear(x[:rows], weight, bias), whole[:rows]), rows
            assert torch.equal(linear(x[-rows:], weight, bias), whole[-rows:]), rows
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (3, 24), (2, 5, 24)])
def test_equals_the_product(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(shape).to(dtype), torch.randn(10, 24).to(dtype), torch.randn(10).to(dtype)
    expected = (x.double() @ weight.double().T + bias.double()).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05  # bf16 keeps 8 bits of sums of about 20
    torch.testing.assert_close(
        linear(x, weight, bias), expected, atol=tolerance, rtol=2e-2 if dtype != torch.float32 else 0
    )


def test_row_of_a_non_contiguous_input() -> None:
    x, weight = torch.randn(24, 5).T, torch.randn(10, 24)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_narrow_operands_are_multiplied_and_not_rounded(device: str) -> None:
    x, weight = (torch.randn(*shape, device=device).bfloat16() for shape in ((5, 512), (70, 512)))
    found = linear_unrounded(x, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
