"""The next step's inputs against a scalar walk over rows that stay, join from a prompt, leave and move."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from katydid_kernels import Sampled, StepInputs, advance
from katydid_kernels.advance import launch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = -77


def case(rows: int, width: int, depth: int, seed: int) -> tuple[StepInputs, Sampled, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    before_rows = rows + 3
    before = Sampled(
        tokens=ints(0, 1000, before_rows, width), accepted=ints(1, width + 1, before_rows),
        first_positions=ints(1, 300, before_rows), drafts=ints(0, 1000, before_rows, depth) if depth else None,
    )  # fmt: skip
    flat = lambda: torch.full((rows * width,), POISON, dtype=torch.int32)  # noqa: E731
    step = StepInputs(
        token_ids=flat(), positions=flat(), slot_mapping=flat(), sample_positions=flat(),
        context_lens=torch.full((rows,), POISON, dtype=torch.int32), block_table=ints(0, 5000, rows, 6),
        limits=ints(100, 384, rows), pending=torch.full((rows * width, width - 1), POISON, dtype=torch.int32),
    )  # fmt: skip
    previous = torch.randperm(before_rows, generator=generator)[:rows].int()
    previous[1::3] = -1
    return step, before, previous


def moved(record: Any, device: str) -> Any:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return type(record)(**{name: None if value is None else value.clone().to(device) for name, value in values.items()})


@pytest.mark.parametrize(("width", "depth"), [(1, 0), (2, 1), (3, 1), (4, 3), (4, 0)])
def test_kernel_and_reference_equal_a_scalar_walk(width: int, depth: int) -> None:
    rows = 13
    step, before, previous = case(rows, width, depth, seed=width)
    on_device = moved(step, DEVICE)
    launch(on_device, moved(before, DEVICE), previous.to(DEVICE))
    advance(step, before, previous)
    for field in fields(step):
        assert torch.equal(getattr(on_device, field.name).cpu(), getattr(step, field.name)), field.name
    ids, at = step.token_ids.view(rows, width).tolist(), step.positions.view(rows, width).tolist()
    for row, source in enumerate(previous.tolist()):
        if source < 0:
            assert set(ids[row] + at[row]) == {POISON}
            assert step.context_lens[row] == POISON
            continue
        last = int(before.accepted[source]) - 1
        drafts = [] if before.drafts is None else before.drafts[source].tolist()
        fed = ([int(before.tokens[source, last]), *drafts] + [0] * width)[:width]
        start = int(before.first_positions[source]) + last
        assert ids[row] == fed
        assert at[row] == list(range(start, start + width))
        assert step.context_lens[row] == start + width
        for j in range(width):
            position, place = start + j, row * width + j
            slot = int(step.block_table[row, position // 64]) * 64 + position % 64
            assert step.slot_mapping[place] == (slot if position < step.limits[row] else -1)
            assert step.sample_positions[place] == position + 1
            assert step.pending is not None
            assert step.pending[place].tolist() == [*fed[1 : 1 + j], *[-1] * (width - 1 - j)]


def test_what_does_not_fit_is_named() -> None:
    step, before, previous = case(4, 2, 1, seed=0)
    with pytest.raises(ValueError, match="previous has 3 rows"):
        advance(step, before, previous[:3])
    advance(moved(step, "cpu"), before, previous)
