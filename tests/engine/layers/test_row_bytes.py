"""Rows as the bytes that travel between ranks, and as those who get them want them."""

from __future__ import annotations

import pytest
import torch
from katydid_engine.layers.activations import Fp8Input, QuantizedRows
from katydid_engine.layers.row_bytes import RowFormat

WIDTH = 256


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn((7, WIDTH), generator=torch.Generator().manual_seed(0)) * torch.arange(1, 8)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_rows_arrive_as_they_were(rows: torch.Tensor, dtype: torch.dtype) -> None:
    way = RowFormat(WIDTH, dtype)
    sent = way.encode(rows.to(dtype))
    assert sent.shape == (7, way.bytes) == (7, WIDTH * dtype.itemsize)
    assert torch.equal(way.decode(sent), rows.to(dtype))


def test_quantised_for_the_way(rows: torch.Tensor) -> None:
    """Half the bytes of bf16 and four a row; an error of at most half a step of e4m3, three bits of mantissa."""
    way = RowFormat(WIDTH, torch.bfloat16, fp8=True)
    sent = way.encode(rows.bfloat16())
    assert sent.shape == (7, way.bytes) == (7, WIDTH + 4)
    arrived = way.decode(sent).float()
    largest = rows.abs().amax(1, keepdim=True)
    assert ((arrived - rows).abs() <= rows.abs() * 2**-4 + largest * 2**-8).all()


@pytest.mark.parametrize(
    ("consumer", "extra"),
    [(Fp8Input(), 4), (Fp8Input(torch.tensor([0.5])), 0), (Fp8Input(group=128), 8)],
    ids=["token", "constant", "group"],
)
def test_a_consumer_of_quantised_rows_gets_what_it_would_have_made(
    rows: torch.Tensor, consumer: Fp8Input, extra: int
) -> None:
    way = RowFormat(WIDTH, torch.float32, consumer=consumer)
    assert way.bytes == WIDTH + extra
    made = consumer.quantize(rows)
    for given in (rows, made):
        arrived = way.decode(way.encode(given))
        assert isinstance(arrived, QuantizedRows)
        assert torch.equal(arrived.values.view(torch.uint8), made.values.view(torch.uint8))
        assert torch.equal(arrived.scale, made.scale)


def test_no_rows() -> None:
    for way in (RowFormat(WIDTH, torch.bfloat16), RowFormat(WIDTH, torch.bfloat16, fp8=True)):
        sent = way.encode(torch.empty((0, WIDTH), dtype=torch.bfloat16))
        assert sent.shape == (0, way.bytes)
        assert way.decode(sent).shape == (0, WIDTH)
