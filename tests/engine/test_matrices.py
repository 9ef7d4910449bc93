"""Matrices of a checkpoint, whole and in parts, in every form: what they dequantise to, exactly where possible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from katydid_engine.checkpoint import Checkpoint
from katydid_engine.matrices import Fp8Matrix, Int4Matrix, PlainMatrix, pack_words, read_matrix, skip_matrix
from katydid_engine.quantization import Scheme, StoredQuantization
from katydid_engine.weights import Weights
from katydid_runtime.errors import ModelFolderError
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.models.stored_quantized import FORMS

SHAPE = (160, 384)
EVERY = (slice(0, 160), slice(0, 384))
PARTS = [EVERY, (slice(80, 160), slice(0, 384)), (slice(0, 160), slice(128, 384)), (slice(40, 50), slice(256, 384))]
STORED = {
    "hy3": StoredQuantization(Scheme.FP8, static_inputs=True),
    "channel": StoredQuantization(Scheme.FP8),
    "blocks": StoredQuantization(Scheme.FP8, blocks=True),
    "int4": StoredQuantization(Scheme.W4A8),
}


@pytest.fixture(scope="module")
def weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(SHAPE) * torch.rand(SHAPE[0], 1)


def weights_of(folder: Path, tensors: dict[str, Tensor], form: str, scheme: Scheme = Scheme.NONE) -> Weights:
    save_file({f"p.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    source = Checkpoint(folder)
    stored = STORED.get(form, StoredQuantization())
    whole = Weights(source, torch.device("cpu"), torch.float32, quantization=stored, scheme=scheme)
    return whole.scope("p")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("form", ["hy3", "channel", "int4"])
def test_parts_are_exact(tmp_path: Path, weight: Tensor, form: str, part: tuple[slice, slice]) -> None:
    stored, wide = FORMS[form].store(weight)
    matrix = read_matrix(weights_of(tmp_path, stored, form), SHAPE, part, row_scales=True)
    assert isinstance(matrix, Int4Matrix if form == "int4" else Fp8Matrix)
    assert torch.equal(matrix.dequantised(), wide[part])
    if isinstance(matrix, Fp8Matrix):
        assert (matrix.input_scale is not None) == (form == "hy3")


@pytest.mark.parametrize("part", [(slice(0, 256), slice(0, 384)), (slice(128, 256), slice(128, 384))])
@pytest.mark.parametrize("row_scales", [False, True])
def test_whole_blocks_keep_their_scales(tmp_path: Path, part: tuple[slice, slice], row_scales: bool) -> None:
    stored, wide = FORMS["blocks"].store(torch.randn(256, 384))
    matrix = read_matrix(weights_of(tmp_path, stored, "blocks"), (256, 384), part, row_scales=row_scales)
    assert isinstance(matrix, Fp8Matrix)
    assert matrix.of_blocks
    assert torch.equal(matrix.dequantised(), wide[part])
    error = (matrix.with_row_scales().dequantised() - wide[part]).norm() / wide[part].norm()
    assert 0 < error < 0.03


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("row_scales", [False, True])
@pytest.mark.parametrize("form", ["channel", "blocks"])
def test_many_scales_become_fewer_by_one_more_rounding(
    tmp_path: Path, weight: Tensor, form: str, row_scales: bool, part: tuple[slice, slice]
) -> None:
    stored, wide = FORMS[form].store(weight)
    matrix = read_matrix(weights_of(tmp_path, stored, form), SHAPE, part, row_scales=row_scales)
    assert isinstance(matrix, Fp8Matrix)
    assert matrix.scale.numel() == (wide[part].shape[0] if row_scales else 1)
    error = (matrix.dequantised() - wide[part]).abs()
    # Half a step of e4m3 (a sixteenth of the value), or of its subnormals.
    scale = wide[part].abs().amax(1, keepdim=True) if row_scales else wide[part].abs().amax()
    assert (error <= (wide[part].abs() / 16).clamp(min=1.01 * scale / 448 * 2**-10)).all()


@pytest.mark.parametrize("form", sorted(STORED))
def test_every_tensor_counts_as_read(tmp_path: Path, weight: Tensor, form: str) -> None:
    weights = weights_of(tmp_path, FORMS[form].store(weight)[0], form)
    skip_matrix(weights, SHAPE)
    assert isinstance(weights.source, Checkpoint)
    assert not weights.source.unused()


def test_plain_matrices(tmp_path: Path, weight: Tensor) -> None:
    for scheme, bound in ((Scheme.NONE, 0.0), (Scheme.FP8, 0.03), (Scheme.W4A8, 0.12)):
        matrix = read_matrix(weights_of(tmp_path, {"weight": weight}, "", scheme), SHAPE, EVERY, row_scales=True)
        wide = matrix.weight if isinstance(matrix, PlainMatrix) else matrix.dequantised()
        assert (wide - weight).norm() / weight.norm() <= bound


@pytest.mark.parametrize("columns", [8, 64, 100, 384])
def test_words(columns: int) -> None:
    """Against the layout's definition, one value at a time."""
    codes = torch.randint(-8, 8, (5, columns), dtype=torch.int8)
    words = pack_words(codes)
    assert words.dtype == torch.int32
    assert words.shape == (5, -(-columns // 8))
    for row in range(5):
        for column in range(columns):
            word = int(words[row, column // 8]) & 0xFFFFFFFF
            assert (word >> 4 * (column % 8) & 15) - 8 == codes[row, column]


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("channel", {"weight_scale": None}, "weight_scale is missing, expected 1 or 160 numbers"),
        ("channel", {"weight_scale": torch.ones(3)}, r"weight_scale has shape \[3\], expected 1 or 160"),
        ("hy3", {"input_scale": None}, "input_scale is missing, expected one number"),
        ("blocks", {"weight_scale_inv": torch.ones(2, 2)}, r"has shape \[2, 2\], expected shape \[2, 3\]"),
        ("int4", {"weight_scale": torch.ones(160, 2)}, r"has shape \[160, 2\], expected \[160, 3\]"),
        ("int4", {"weight_shape": torch.tensor([160, 383])}, r"weight_shape is \[160, 383\], expected \[160, 384\]"),
        ("int4", {"weight_packed": torch.ones(160, 48)}, "has type F32, expected one of I32"),
    ],
)
def test_wrong_tensors(
    tmp_path: Path, weight: Tensor, form: str, change: dict[str, Tensor | None], message: str
) -> None:
    tensors = FORMS[form].store(weight)[0] | change
    weights = weights_of(tmp_path, {k: v for k, v in tensors.items() if v is not None}, form)
    with pytest.raises(ModelFolderError, match=message):
        read_matrix(weights, SHAPE, EVERY, row_scales=True)


@pytest.mark.parametrize("columns", [(0, 192), (192, 384), (64, 96), (36, 301)])
def test_parts_of_groups_are_exact(tmp_path: Path, weight: Tensor, columns: tuple[int, int]) -> None:
    stored, wide = FORMS["int4"].store(weight)
    part = read_matrix(weights_of(tmp_path, stored, "int4"), SHAPE, (slice(0, 160), slice(*columns)), row_scales=True)
    assert isinstance(part, Int4Matrix)
    assert part.lead == columns[0] % 128
    assert torch.equal(part.dequantised(), wide[:, slice(*columns)])


def test_fp8_weights_without_a_quantization_config(tmp_path: Path, weight: Tensor) -> None:
    """What tells that a matrix is quantised is the matrix: its scales are read all the same."""
    stored, wide = FORMS["channel"].store(weight)
    matrix = read_matrix(weights_of(tmp_path, stored, ""), SHAPE, EVERY, row_scales=True)
    assert isinstance(matrix, Fp8Matrix)
    assert torch.equal(matrix.dequantised(), wide)
