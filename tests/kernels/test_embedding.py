"""A rank's rows of an embedding, in the interpreter where there is no GPU; the ranks' sum is the whole."""

from __future__ import annotations

import importlib

import pytest
import torch
from katydid_kernels.embedding import embedding_reference

# The package names its ops' functions, which hide the modules of the same names from a plain import statement.
module = importlib.import_module("katydid_kernels.embedding")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture(autouse=True)
def _kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_kernel", lambda weight: True)


@pytest.mark.parametrize(("first", "rows", "n"), [(0, 50, 64), (20, 13, 100), (49, 1, 4096)])
def test_parts_of_a_vocabulary(first: int, rows: int, n: int) -> None:
    ids = torch.arange(49, -1, -1, dtype=torch.int32, device=DEVICE)
    weight = torch.randn(rows, n, device=DEVICE)
    found = module.embedding(ids, weight, first=first)
    assert torch.equal(found, embedding_reference(ids, weight, first=first))
    assert torch.equal(found[49 - first], weight[0])
    assert not found[(ids < first) | (ids >= first + rows)].any()


def test_tokens_at_position_zero_have_none() -> None:
    ids = torch.tensor([7, 0, 9, 3, 3], dtype=torch.int32, device=DEVICE)
    weight = torch.randn(10, 32, device=DEVICE)
    positions = torch.tensor([0, 1, 2, 0, 5], dtype=torch.int32, device=DEVICE)
    found = module.embedding(ids, weight, positions=positions)
    assert torch.equal(found, embedding_reference(ids, weight, positions=positions))
    assert torch.equal(found[[1, 2, 4]], weight[[0, 9, 3]])
    assert not found[[0, 3]].any()


def test_the_sum_of_all_parts_is_the_whole() -> None:
    ids = torch.tensor([7, 0, 9, 3, 3], dtype=torch.int32, device=DEVICE)
    weight = torch.randn(10, 32, device=DEVICE)
    parts = [module.embedding(ids, weight[first : first + 4].contiguous(), first=first) for first in (0, 4, 8)]
    assert torch.equal(sum(parts), weight[ids.long()])


def test_no_tokens() -> None:
    empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert module.embedding(empty, torch.randn(4, 8, device=DEVICE)).shape == (0, 8)
