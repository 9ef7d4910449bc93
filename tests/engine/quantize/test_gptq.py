"""GPTQ against a plain float64 implementation that inverts the Hessian anew for every column."""

from __future__ import annotations

import pytest
import torch
from katydid_engine.quantize.gptq import E4M3, follow_drift, gptq, output_error, refit_scales
from katydid_engine.quantize.recipe import Gptq
from katydid_engine.quantize.rounding import Fp8Rounding
from katydid_kernels import dequantize_int4, quantize_int4
from torch import Tensor

SHAPES = [(3, 5, 16), (2, 7, 130), (1, 33, 256)]


def correlated(batch: int, rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """A weight, and a Hessian of rows whose channels depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(batch, rows, columns, generator=generator)
    mix = torch.randn(batch, columns, columns, generator=generator) / columns**0.5
    x = torch.randn(batch, 4 * columns, columns, generator=generator) @ (mix + 0.5 * torch.eye(columns))
    return weight, x.mT @ x


def plain_gptq(weight: Tensor, hessian: Tensor, scales: Tensor, damping: float, act_order: bool) -> list[list[int]]:
    """Optimal brain surgery, one matrix, one row, one column after the other."""
    h = hessian.double() + damping * hessian.diagonal().double().mean() * torch.eye(len(hessian), dtype=torch.float64)
    order = list(range(len(h)))
    if act_order:
        order.sort(key=lambda column: -float(hessian[column, column]))
    codes = [[0] * len(h) for _ in weight]
    for row, values in enumerate(weight.double()):
        values, left = values.clone(), list(order)
        while left:
            inverse = torch.linalg.inv(h[left][:, left])
            column = left[0]
            scale = float(scales[row, column // 128])
            code = max(-8, min(7, round(float(values[column]) / scale)))
            codes[row][column] = code
            error = (float(values[column]) - code * scale) / float(inverse[0, 0])
            values[left] -= error * inverse[0]
            left.pop(0)
    return codes


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("act_order", [False, True])
def test_against_float64(shape: tuple[int, int, int], act_order: bool) -> None:
    weight, hessian = correlated(*shape, seed=shape[2])
    _, scales = quantize_int4(weight, "mse")
    codes = gptq(weight, hessian, scales, damping=0.02, act_order=act_order)
    for index in range(shape[0]):
        wanted = plain_gptq(weight[index], hessian[index], scales[index].float(), 0.02, act_order)
        # fp32 may break a tie of rounding the other way, after which the rest of a row differs.
        same = [row == want for row, want in zip(codes[index].tolist(), wanted, strict=True)]
        assert sum(same) >= len(same) - 1


@pytest.mark.parametrize("shape", SHAPES)
def test_each_step_is_nearer(shape: tuple[int, int, int]) -> None:
    weight, hessian = correlated(*shape, seed=1)
    plain, scales = quantize_int4(weight, "mse")
    codes = gptq(weight, hessian, scales)
    refitted = refit_scales(weight, hessian, codes)
    errors = [
        output_error(weight, hessian, dequantize_int4(*pair))
        for pair in ((plain, scales), (codes, scales), (codes, refitted))
    ]
    assert (errors[1] < 0.9 * errors[0]).all()
    assert (errors[2] <= errors[1] * 1.001).all()


def test_refitted_scales_are_least_squares() -> None:
    weight, hessian = correlated(1, 4, 256, seed=3)
    codes, _ = quantize_int4(weight, "none")
    found = refit_scales(weight, hessian, codes, damping=1e-9).double()
    factor = torch.linalg.cholesky(hessian[0].double())
    for row in range(4):
        parts = torch.zeros(256, 2, dtype=torch.float64)
        parts[:128, 0], parts[128:, 1] = codes[0, row, :128].double(), codes[0, row, 128:].double()
        wanted = torch.linalg.lstsq(factor.T @ parts, factor.T @ weight[0, row].double()[:, None]).solution[:, 0]
        torch.testing.assert_close(found[0, row], wanted, rtol=5e-3, atol=0)  # bf16


def test_drift_is_followed() -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(1, 6, 40, generator=generator)
    x = torch.randn(400, 40, generator=generator)
    drifted = x + 0.2 * torch.randn(400, 40, generator=generator) + 0.3 * x.roll(1, 1)
    moved = follow_drift(weight, (drifted.T @ drifted)[None], ((x - drifted).T @ drifted)[None], damping=1e-7)[0]
    wanted = torch.linalg.lstsq(drifted.double(), x.double() @ weight[0].T.double()).solution.T
    torch.testing.assert_close(moved.double(), wanted, rtol=1e-3, atol=1e-3)


def test_rows_that_never_come() -> None:
    """Columns no calibration row touches, and a Hessian without rows, are rounded to nearest."""
    weight, hessian = correlated(2, 4, 64, seed=7)
    hessian[0] = 0
    hessian[1, :, 10:20] = 0
    hessian[1, 10:20] = 0
    plain, scales = quantize_int4(weight, "mse")
    codes = gptq(weight, hessian, scales)
    assert torch.equal(codes[0], plain[0])
    assert torch.equal(codes[1, :, 10:20], plain[1, :, 10:20])
    assert refit_scales(weight, hessian, codes).isfinite().all()


def test_of_e4m3() -> None:
    """Nearer than rounding, on the same scales; with nothing known of the rows it is rounding."""
    weight, hessian = correlated(2, 12, 130, seed=4)
    rounding = Fp8Rounding([8, 4])
    plain, found = rounding.nearest(weight), rounding.by_hessian(weight, hessian, Gptq())
    assert torch.equal(plain.scales, found.scales)
    assert plain.scales[0, :8].unique().numel() == 1 != plain.scales[0].unique().numel()
    errors = [output_error(weight, hessian, one.weight) for one in (plain, found)]
    assert (errors[1] < 0.85 * errors[0]).all()
    assert torch.equal(rounding.by_hessian(weight, hessian * 0, Gptq()).codes.float(), plain.codes.float())
    codes = gptq(weight, hessian, plain.scales, grid=E4M3)
    assert codes.dtype == torch.float8_e4m3fn
    second = rounding.matrix(found, 1, slice(8, 12))
    assert second.scale.shape == (1,)
    assert torch.equal(second.dequantised(), found.weight[1, 8:])
