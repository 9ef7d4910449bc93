"""Quantised products and experts: ranks against one rank, and against the formula where scales are constant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from katydid_engine.checkpoint import Checkpoint
from katydid_engine.layers.activations import Fp8Input, QuantizedRows
from katydid_engine.layers.expert_loading import load_experts
from katydid_engine.layers.expert_share import ExpertShare
from katydid_engine.layers.linear import ColumnLinear, RowLinear
from katydid_engine.model_config import MoeConfig
from katydid_engine.quantization import Scheme, StoredQuantization
from katydid_engine.rank_slice.absent_ranks import AbsentRanks
from katydid_engine.weights import Weights
from katydid_runtime.errors import ModelFolderError, SettingsError
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.models.stored_quantized import FORMS
from tests.engine.test_matrices import STORED

HIDDEN, WIDTH, EXPERTS = 256, 128, 4
MOE = MoeConfig(
    num_experts=EXPERTS,
    top_k=2,
    intermediate_size=WIDTH,
    scoring="softmax",
    renormalise=True,
    routed_scale=1.0,
    shared_intermediate_size=0,
)
E4M3 = torch.float8_e4m3fn


def weights_of(folder: Path, matrices: dict[str, Tensor], form: str, *, rank: int = 0, size: int = 1) -> Weights:
    """The matrices in a form; "plain" ones become fp8 when they are read."""
    tensors: dict[str, Tensor] = {}
    for name, weight in matrices.items():
        stored = {"weight": weight} if form == "plain" else FORMS[form].store(weight)[0]
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    return Weights(
        Checkpoint(folder),
        torch.device("cpu"),
        torch.float32,
        rank,
        size,
        quantization=STORED.get(form, StoredQuantization()),
        scheme=Scheme.FP8 if form == "plain" else Scheme.NONE,
    )


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.fixture(scope="module")
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(9, HIDDEN)


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) / columns**0.5


@pytest.mark.parametrize("form", ["hy3", "channel", "blocks", "int4"])
def test_columns_of_two_ranks_are_those_of_one(tmp_path: Path, x: Tensor, form: str) -> None:
    matrices = {"q": matrix(512, HIDDEN, 2), "k": 3 * matrix(256, HIDDEN, 3)}
    whole, first, second = (
        ColumnLinear(
            weights_of(tmp_path, matrices, form, rank=rank, size=size), [("q", 512), ("k", 256)], HIDDEN, bias=False
        )(x)
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    assert torch.equal(torch.cat((first[:, :256], second[:, :256]), 1), whole[:, :512])
    assert torch.equal(torch.cat((first[:, 256:], second[:, 256:]), 1), whole[:, 512:])
    wide = torch.cat([FORMS[form].store(weight)[1] for weight in matrices.values()])
    assert relative_error(whole, x @ wide.T) < 0.03


@pytest.mark.parametrize("form", ["hy3", "channel", "blocks", "int4", "plain"])
def test_rows_of_two_ranks_add_up(tmp_path: Path, x: Tensor, form: str) -> None:
    weight = matrix(64, HIDDEN, 4)
    whole = RowLinear(weights_of(tmp_path, {"o": weight}, form).scope("o"), HIDDEN, 64, bias=False)(x)
    parts = [
        RowLinear(weights_of(tmp_path, {"o": weight}, form, rank=rank, size=2).scope("o"), HIDDEN, 64, bias=False)(
            x[:, 128 * rank : 128 * rank + 128]
        )
        for rank in range(2)
    ]
    assert (
        relative_error(parts[0] + parts[1], whole) < 0.045
    )  # each rank's rows, and its part of the weight, have scales of their own


def test_int4_rows_cut_inside_a_group_add_up(tmp_path: Path) -> None:
    """Where one token's rows have one scale on all ranks, the sums are one rank's but for the order of adding."""
    weight, x = matrix(64, 384, 4), torch.randn(9, 384).to(E4M3)
    scale = torch.rand(9) + 0.5
    whole, first, second = (
        RowLinear(weights_of(tmp_path, {"o": weight}, "int4", rank=rank, size=size).scope("o"), 384, 64, bias=False)(
            QuantizedRows(x[:, slice(384 // size * rank, 384 // size * (rank + 1))].contiguous(), scale)
        )
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    assert relative_error(first + second, whole) < 4e-3  # each is rounded to bf16


def test_constant_scales_of_activations(tmp_path: Path, x: Tensor) -> None:
    """The largest of the joined matrices' scales quantises the rows, whatever they hold."""
    weights = weights_of(tmp_path, {"a": matrix(64, HIDDEN, 5), "b": matrix(32, HIDDEN, 6)}, "hy3")
    layer = ColumnLinear(weights, [("a", 64), ("b", 32)], HIDDEN, bias=False)
    assert layer.input is not None
    assert layer.input.scale is not None
    torch.testing.assert_close(layer.input.scale, torch.tensor([1.5]))
    rows = (x / 1.5).to(E4M3)
    wide = torch.cat([FORMS["hy3"].store(matrix(size, HIDDEN, seed))[1] for size, seed in ((64, 5), (32, 6))])
    torch.testing.assert_close(layer(x), rows.float() @ wide.T * 1.5, atol=1e-4, rtol=1e-4)
    assert torch.equal(layer(QuantizedRows(rows, layer.input.scale)), layer(x))


@pytest.mark.parametrize(
    ("form", "expected"),
    [("channel", Fp8Input()), ("int4", Fp8Input()), ("blocks", Fp8Input(group=128)), ("plain", Fp8Input())],
)
def test_what_a_product_wants_of_its_rows(tmp_path: Path, form: str, expected: Fp8Input) -> None:
    weights = weights_of(tmp_path, {"q": matrix(128, HIDDEN, 7)}, form)
    assert ColumnLinear(weights, [("q", 128)], HIDDEN, bias=False).input == expected


def experts_of(
    folder: Path, form: str, *, rank: int = 0, size: int = 1, expert_parallel: bool = False, width: int = WIDTH
) -> Tensor:
    matrices = {}
    for expert in range(EXPERTS):
        matrices[f"experts.{expert}.gate_proj"] = 2 * matrix(width, HIDDEN, 10 * expert)
        matrices[f"experts.{expert}.up_proj"] = matrix(width, HIDDEN, 10 * expert + 1)
        matrices[f"experts.{expert}.down_proj"] = matrix(HIDDEN, width, 10 * expert + 2)
    weights = weights_of(folder, matrices, form, rank=rank, size=size)
    share = ExpertShare.of_columns(EXPERTS, rank, size)
    if expert_parallel:
        weights = replace(weights, rank=0, size=1)
        share = ExpertShare.of_whole(EXPERTS, AbsentRanks(rank, size))
    experts = load_experts(weights, replace(MOE, intermediate_size=width), HIDDEN, torch.ones(HIDDEN), share)
    torch.manual_seed(3)
    x, ids = torch.randn(9, HIDDEN), torch.rand(9, EXPERTS).topk(2).indices.int()
    return experts(x, torch.rand(9, 2), ids, None)


@pytest.mark.parametrize("form", ["hy3", "channel", "blocks", "plain"])
def test_experts_cut_by_column_add_up(tmp_path: Path, form: str) -> None:
    whole = experts_of(tmp_path, form)
    parts = [experts_of(tmp_path, form, rank=rank, size=2) for rank in range(2)]
    assert relative_error(parts[0] + parts[1], whole) < 0.08


@pytest.mark.parametrize("form", ["hy3", "channel", "blocks", "int4", "plain"])
def test_experts_cut_by_id_add_up(tmp_path: Path, form: str) -> None:
    whole = experts_of(tmp_path, form)
    parts = [experts_of(tmp_path, form, rank=rank, size=2, expert_parallel=True) for rank in range(2)]
    assert relative_error(parts[0] + parts[1], whole) < 0.03


@pytest.mark.parametrize(("width", "size"), [(256, 2), (384, 2), (128, 2), (128, 4), (192, 2), (576, 6)])
def test_int4_experts_cut_inside_a_group_add_up(tmp_path: Path, width: int, size: int) -> None:
    """Ranks that begin between two groups, or in the middle of one that ends before they do, or after."""
    whole = experts_of(tmp_path, "int4", width=width)
    parts = [experts_of(tmp_path, "int4", rank=rank, size=size, width=width) for rank in range(size)]
    assert relative_error(torch.stack(parts).sum(0), whole) < 0.04


def test_narrow_int4_experts(tmp_path: Path) -> None:
    moe = MoeConfig(1, 1, 16, "softmax", True, 1.0, 0)
    names = {"gate": (16, HIDDEN), "up": (16, HIDDEN), "down": (HIDDEN, 16)}
    weights = weights_of(tmp_path, {f"experts.0.{n}_proj": matrix(*s, 8) for n, s in names.items()}, "int4")
    with pytest.raises(SettingsError, match="have 16 columns, int4 needs a multiple of 32"):
        load_experts(weights, moe, HIDDEN, torch.ones(HIDDEN), ExpertShare.of_columns(moe.num_experts, 0, 1))


def test_experts_of_two_kinds(tmp_path: Path) -> None:
    moe = MoeConfig(2, 1, WIDTH, "softmax", True, 1.0, 0)
    tensors = {}
    for expert in range(2):
        for name, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
            weight = matrix(*shape, expert)
            stored = FORMS["channel"].store(weight)[0] if expert else {"weight": weight}
            tensors |= {f"experts.{expert}.{name}_proj.{part}": value for part, value in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = Weights(Checkpoint(tmp_path), torch.device("cpu"), torch.float32)
    with pytest.raises(ModelFolderError, match="not all are stored alike") as caught:
        load_experts(weights, moe, HIDDEN, torch.ones(HIDDEN), ExpertShare.of_columns(moe.num_experts, 0, 1))
    assert caught.value.field == "experts.1"
