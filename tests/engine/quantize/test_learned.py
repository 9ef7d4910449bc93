"""Weights that are learned as they will be stored."""

from __future__ import annotations

import torch
from katydid_engine.matrices import Int4Matrix, to_fp8, to_int4
from katydid_engine.quantize.learned import LearnedFp8, LearnedInt4
from katydid_engine.quantize.recipe import Distillation
from torch import Tensor

ROWS, COLUMNS = 24, 200
OPTIONS = Distillation(learning_rate=0.01, rounding_rate=0.05)


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2)]


def learn(learned: LearnedInt4 | LearnedFp8, rows: Tensor, wanted: Tensor, options: Distillation) -> float:
    """The error of a product that was 1 before."""
    given = learned.parameters(options)
    optimizer = torch.optim.Adam([{"params": [tensor]} for tensor, _ in given])
    first, steps = 0.0, 60
    for step in range(steps):
        for group, (_, rate) in zip(optimizer.param_groups, given, strict=True):
            group["lr"] = rate * (1 - step / steps)
        loss = (rows @ learned.weight().T - wanted).square().sum()
        first = first or float(loss.detach())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return float((rows @ learned.weight().T - wanted).square().sum().detach()) / first


def test_int4_begins_as_it_was_and_ends_as_it_is_stored() -> None:
    given = [to_int4(weight, "mse") for weight in weights()]
    learned = LearnedInt4(given)
    assert torch.equal(learned.weight().detach(), torch.cat([matrix.dequantised() for matrix in given]))
    for before, after in zip(given, learned.matrices(), strict=True):
        assert torch.equal(before.codes, after.codes)
        assert torch.equal(before.scales, after.scales)
    rows = torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(2))
    left = learn(learned, rows, rows @ torch.cat(weights()).T, OPTIONS)
    assert left < 0.6
    stored = torch.cat([matrix.dequantised() for matrix in learned.matrices()])
    torch.testing.assert_close(stored, learned.weight().detach(), rtol=2**-8, atol=1e-6)  # scales are bf16
    assert all(matrix.codes.min() >= -8 and matrix.codes.max() <= 7 for matrix in learned.matrices())


def test_without_a_rate_codes_stay() -> None:
    given = [to_int4(weight, "none") for weight in weights()]
    learned = LearnedInt4(given)
    rows = torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(2))
    still = OPTIONS.model_copy(update={"rounding_rate": 0.0})
    assert learn(learned, rows, rows @ torch.cat(weights()).T, still) < 1
    changed: list[Int4Matrix] = learned.matrices()
    assert all(torch.equal(before.codes, after.codes) for before, after in zip(given, changed, strict=True))
    assert not LearnedFp8([to_fp8(weight) for weight in weights()]).parameters(still)


def test_e4m3_keeps_its_scale_and_rounds_to_what_is_stored() -> None:
    given = [to_fp8(weight * factor) for weight, factor in zip(weights(), (1.0, 5.0), strict=True)]
    learned = LearnedFp8(given)
    assert torch.equal(learned.weight().detach(), torch.cat([matrix.dequantised() for matrix in given]))
    rows = torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(2))
    wanted = rows @ torch.cat([weights()[0], 5 * weights()[1]]).T
    assert learn(learned, rows, wanted, OPTIONS) < 0.5
    for before, after in zip(given, learned.matrices(), strict=True):
        assert torch.equal(before.scale, after.scale)
        assert after.weight.float().isfinite().all()
        assert not torch.equal(before.weight.float(), after.weight.float())
    stored = torch.cat([matrix.dequantised() for matrix in learned.matrices()])
    assert torch.equal(stored, learned.weight().detach())
