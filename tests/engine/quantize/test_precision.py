"""Which products a GPU may make in TF32 is told to torch, and taken back."""

from __future__ import annotations

import pytest
import torch
from katydid_engine.quantize.precision import fp32_products, tf32_products


def test_nested_and_taken_back_after_an_error() -> None:
    before = torch.get_float32_matmul_precision()

    def work() -> None:
        with tf32_products("cuda"):
            assert torch.get_float32_matmul_precision() == "high"
            with fp32_products("cuda"):
                assert torch.get_float32_matmul_precision() == "highest"
            assert torch.get_float32_matmul_precision() == "high"
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        work()
    assert torch.get_float32_matmul_precision() == before


def test_a_cpu_multiplies_as_it_did() -> None:
    before = torch.get_float32_matmul_precision()
    with tf32_products("cpu"):
        assert torch.get_float32_matmul_precision() == before
