"""GPTQ's inner loop: the kernel against the loop in torch, and that against exact sums.

The interpreter does not round to e4m3 as the GPU does: there the kernel is tried with int4 alone.
"""

from __future__ import annotations

import pytest
import torch
from katydid_kernels import round_columns, round_columns_reference
from katydid_kernels.round_columns import launch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(batch: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Views into something wider, as GPTQ has them."""
    generator = torch.Generator().manual_seed(rows + columns)
    wide = torch.randn(batch, rows, columns + 24, generator=generator).to(DEVICE)
    scales = torch.rand(batch, rows, columns + 24, generator=generator).to(DEVICE) + 0.5
    spread = torch.randn(batch, columns + 24, columns + 24, generator=generator).triu(1) / columns**0.5
    spread = (spread + torch.eye(columns + 24) * 0.7).to(DEVICE)
    part = slice(16, 16 + columns)
    scale = 0.3 if dtype == torch.int8 else 0.01
    return wide[..., part], scales[..., part] * scale, spread[:, part, part]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(2, 5, 33), (1, 17, 128), (3, 16, 64)])
def test_kernel_against_the_loop(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    if DEVICE == "cpu" and dtype == torch.float8_e4m3fn:
        pytest.skip("the interpreter rounds to e4m3 in its own way")
    weight, scales, spread = case(*shape, dtype)
    codes, errors = launch(weight, scales, spread, dtype)
    wanted, wanted_errors = round_columns_reference(weight, scales, spread, dtype)
    # A tie that breaks the other way changes what follows in its row.
    same = (codes == wanted).all(2)
    assert same.float().mean() >= 0.9
    torch.testing.assert_close(errors[same], wanted_errors[same], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_errors_account_for_all_that_codes_leave_out(dtype: torch.dtype) -> None:
    weight, scales, spread = case(2, 7, 40, dtype)
    codes, errors = round_columns(weight, scales, spread, dtype)
    assert torch.equal(codes, codes.to(dtype).float())
    # Every column is its code and what all errors up to it took away: w = code s + error u.
    left = weight.double() - codes.double() * scales.double()
    assert (left - errors.double() @ spread.double()).abs().max() < 1e-5


def test_ties_clamps_and_scales_of_zero() -> None:
    weight = torch.tensor([[[0.5, 1.5, -0.5, -2.5, 30.0, -30.0, 3.0]]], device=DEVICE)
    scales = torch.tensor([[[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]]], device=DEVICE)
    for made in (launch, round_columns_reference):
        codes, errors = made(weight, scales, torch.eye(7, device=DEVICE)[None], torch.int8)
        assert codes[0, 0, :6].tolist() == [0, 2, 0, -2, 7, -8]
        assert errors[0, 0].tolist() == [0.5, -0.5, -0.5, -0.5, 23.0, -22.0, 3.0]
    assert round_columns(weight[:, :0], scales[:, :0], torch.eye(7, device=DEVICE)[None], torch.int8)[0].shape[1] == 0


def test_errors_name_what_is_wrong() -> None:
    one = torch.ones(1, 2, 3, device=DEVICE)
    with pytest.raises(ValueError, match=r"int8 or float8_e4m3fn, got torch\.int32"):
        round_columns(one, one, torch.ones(1, 3, 3, device=DEVICE), torch.int32)
    with pytest.raises(ValueError, match=r"spread \[B, C, C\], got \[1, 2, 3\], \[1, 2, 3\] and \[1, 2, 2\]"):
        round_columns(one, one, torch.ones(1, 2, 2, device=DEVICE), torch.int8)
    wide = torch.ones(1, 1, 129, device=DEVICE)
    with pytest.raises(ValueError, match="C <= 128"):
        round_columns(wide, wide, torch.ones(1, 129, 129, device=DEVICE), torch.int8)
