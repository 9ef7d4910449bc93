"""Which slot a row's choice of an expert goes to, and what is counted of it."""

from __future__ import annotations

import torch
from katydid_engine.layers.expert_table import ExpertTable

CPU = torch.device("cpu")


def test_copies_take_turns_by_row_and_choices_are_counted() -> None:
    table = ExpertTable(3, 3, CPU)
    table.place([0, 1, 0, 2, 0, 1])
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 1], [2, 0]], dtype=torch.int32)
    slots = table.slots(ids, 4, 99)
    assert slots.tolist() == [[0, 1], [2, 3], [4, 1], [0, 5], [99, 99]]
    assert table.chosen.tolist() == [4, 3, 1]
    assert slots.dtype == torch.int32


def test_without_copies_a_slot_is_its_expert() -> None:
    table = ExpertTable(3, 0, CPU)
    ids = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    assert table.slots(ids, 2, 99).tolist() == ids.tolist()
    assert table.slots(ids, 1, 99).tolist() == [[2, 0], [99, 99]]
    assert ids.tolist() == [[2, 0], [1, 2]]
