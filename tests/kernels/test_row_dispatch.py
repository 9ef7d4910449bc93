"""Rows to ranks and back by both ways: torch, and the kernels (in the interpreter where there is no GPU)."""

from __future__ import annotations

import importlib

import pytest
import torch
from katydid_kernels import gather_rows, join_rows, quantize_fp8, route_rows, scatter_rows, split_rows
from torch import Tensor

module = importlib.import_module("katydid_kernels.row_dispatch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANKS, SLOTS, TOP_K, N = 3, 4, 3, 20
NOWHERE = RANKS * SLOTS


@pytest.fixture(params=["torch", "kernels"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "_has_kernels", lambda _: request.param == "kernels")
    if request.param == "torch" and DEVICE == "cuda":
        pytest.skip("what runs without a GPU")
    return str(request.param)


def routed(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, NOWHERE + 1, (rows, TOP_K), generator=generator, dtype=torch.int32)
    return ids.to(DEVICE)


def expected_order(ids: Tensor) -> tuple[list[list[int]], list[int]]:
    """One row after the other."""
    counts = [0] * RANKS
    order = []
    for row in ids.tolist():
        numbers = [-1] * RANKS
        for rank in {slot // SLOTS for slot in row if slot < NOWHERE}:
            numbers[rank] = counts[rank]
            counts[rank] += 1
        order.append(numbers)
    return order, counts


@pytest.mark.parametrize("rows", [0, 1, 17, 1030])
def test_order_of_messages(rows: int) -> None:
    ids = routed(rows)
    order, counts = route_rows(ids, SLOTS, RANKS)
    assert (order.tolist(), counts.tolist()) == expected_order(ids)


@pytest.mark.parametrize("capacity", [None, 9])
@pytest.mark.parametrize("quantized", [False, True])
def test_there_and_back(quantized: bool, capacity: int | None) -> None:
    """Every rank sees the rows that go to it with their scales, slots and weights; what comes back is summed."""
    ids = routed(9)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, N, generator=generator).to(DEVICE)
    weights = torch.rand(9, TOP_K, generator=generator).to(DEVICE)
    values, scales = quantize_fp8(x) if quantized else (x, None)
    order, counts = route_rows(ids, SLOTS, RANKS)
    each = counts.tolist()
    starts = [sum(each[:rank]) if capacity is None else rank * capacity for rank in range(RANKS)]
    total = sum(each) if capacity is None else RANKS * capacity
    message = scatter_rows(
        values, None if scales is None else scales[:, None], ids, weights, order, counts,
        total=total, capacity=capacity, nowhere=NOWHERE,
    )  # fmt: skip
    value_bytes = N if quantized else 4 * N
    assert message.shape == (total, value_bytes + 4 * quantized + 8 * TOP_K)
    arrived, arrived_scales, arrived_ids, arrived_weights = split_rows(message, value_bytes, int(quantized), TOP_K)
    for rank, (start, count) in enumerate(zip(starts, each, strict=True)):
        goes = order[:, rank] >= 0
        mine = slice(start, start + count)
        assert torch.equal(arrived[mine], values[goes].view(torch.uint8))
        assert torch.equal(arrived_ids[mine], ids[goes])
        assert torch.equal(arrived_weights[mine], weights[goes])
        if scales is not None:
            assert torch.equal(arrived_scales[mine, 0], scales[goes])
        if capacity is not None:
            assert (arrived_ids[start + count : start + capacity] == NOWHERE).all()
    back = torch.randn(total, N, generator=generator).to(DEVICE)
    home = join_rows(back) if quantized else back
    rows = back
    if quantized:
        scale = home[:, N:].contiguous().view(torch.float32)
        torch.testing.assert_close(scale[:, 0], quantize_fp8(back)[1], rtol=1e-6, atol=0)
        rows = home[:, :N].contiguous().view(torch.float8_e4m3fn).float() * scale
        # The interpreter truncates its fp8 casts.
        assert (rows - back).norm() <= back.norm() * (0.032 if DEVICE == "cuda" else 0.12)
    extra = torch.randn(9, N, generator=generator).to(DEVICE)
    expected = extra.double()
    for row, numbers in enumerate(order.tolist()):
        for rank, number in enumerate(numbers):
            if number >= 0:
                expected[row] += rows[starts[rank] + number].double()
    for added, wanted in ((extra, expected), (None, expected - extra.double())):
        found = gather_rows(home, order, counts, added, torch.float32, quantized=quantized, capacity=capacity)
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
