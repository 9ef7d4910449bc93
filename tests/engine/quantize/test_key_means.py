"""What e4m3 pages leave out of keys, and the balance of queries against what is left: no answer changes by either."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid_engine.checkpoint import KEY_MEANS, Checkpoint
from katydid_engine.layers.rotary import rotary_table
from katydid_engine.loader import load_model
from katydid_engine.model_config import read_model_config
from katydid_engine.quantization import Scheme
from katydid_engine.quantize import Options, Recipe, quantize_folder
from katydid_engine.quantize.balance import balance_keys
from katydid_engine.quantize.block import Block, rotary_angles, rotated
from katydid_engine.quantize.distill import QuantisedMatrix
from katydid_engine.quantize.distilled_folder import read_both
from katydid_engine.quantize.layer_files import layer_files
from katydid_engine.quantize.pages import PageRounding, PageScales, mean_rotation
from katydid_engine.quantize.whole_model import Layer, WholeModel, stacked
from katydid_runtime.errors import ModelFolderError, SettingsError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.models.families import FAMILIES, forward, make_family, prompt
from tests.engine.quantize.test_block import LENGTH, whole
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module", params=["llama3", "hy_v3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases, and with norms of q and k."""
    assert request.param in FAMILIES
    return make_family(request.param, tmp_path_factory.mktemp(request.param)).folder


@settings(max_examples=50, deadline=None)
@given(frequency=st.floats(1e-7, 3.1), positions=st.integers(1, 3000))
def test_the_mean_rotation_is_an_average(frequency: float, positions: int) -> None:
    angles = torch.arange(positions, dtype=torch.float64) * frequency
    cos, sin = mean_rotation(torch.tensor([frequency], dtype=torch.float64), positions)
    assert cos.item() == pytest.approx(angles.cos().mean().item(), abs=1e-5)
    assert sin.item() == pytest.approx(angles.sin().mean().item(), abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), base=st.floats(10.0, 1e7), positions=st.integers(1, 2000))
def test_keys_over_the_whole_context_lose_energy(seed: int, base: float, positions: int) -> None:
    """By what is taken off, whatever keys are and wherever they were seen: no pair of columns is worse on average."""
    frequencies = base ** -(torch.arange(8) / 8)
    mean = torch.randn(16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    angles = torch.arange(positions).double()[:, None] * frequencies.double()
    keys = rotated(mean.expand(positions, -1), angles.cos(), angles.sin())
    left_out = rotated(mean, *(part.double() for part in mean_rotation(frequencies, positions)))
    before, after = (x.square().view(-1, 2, 8).sum(1).mean(0) for x in (keys, keys - left_out))
    torch.testing.assert_close(before - after, left_out.square().view(2, 8).sum(0), atol=1e-4, rtol=1e-4)


@dataclass(frozen=True)
class _Unrounded(PageRounding):
    """Pages that leave out the mean and keep every digit."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.scales.key_mean is not None
        return q, k - self.scales.key_mean, v


def test_means_change_no_logit(folder: Path) -> None:
    model, blocks, angles = whole(folder)
    ids = torch.tensor([prompt(LENGTH)])
    torch.manual_seed(0)
    one = torch.ones(1)
    config = blocks[0].config
    means = [2 * torch.randn(config.num_kv_heads, config.head_dim) for _ in blocks]
    without = [
        replace(block, pages=_Unrounded(PageScales(one, one, mean), False))
        for block, mean in zip(blocks, means, strict=True)
    ]
    found = WholeModel(model.embedding, model.head, model.norm, [stacked(block) for block in without])
    torch.testing.assert_close(found.logits(ids, angles), model.logits(ids, angles), atol=1e-4, rtol=0)


def walked(model: WholeModel, blocks: list[Block], angles: tuple[Tensor, Tensor], ids: Tensor) -> list[Tensor]:
    """Hidden states in front of every layer."""
    x, found = F.embedding(ids, model.embedding), []
    for block in blocks:
        found.append(x)
        x = stacked(block)(x, angles)
    return found


def test_balance_changes_no_logit(folder: Path) -> None:
    model, blocks, angles = whole(folder)
    ids = torch.tensor([prompt(LENGTH)])
    turn = mean_rotation(torch.logspace(0, -4, blocks[0].config.head_dim // 2), 2048)
    balanced = [
        balance_keys(block, x, angles, turn, torch.float32)
        for block, x in zip(blocks, walked(model, blocks, angles, ids), strict=True)
    ]
    found = WholeModel(model.embedding, model.head, model.norm, [stacked(block) for block in balanced])
    torch.testing.assert_close(found.logits(ids, angles), model.logits(ids, angles), atol=1e-4, rtol=0)


def test_balance_is_the_least_of_the_product(folder: Path) -> None:
    """Of the energies of q and k, which a rounded key costs; with a factor for each KV head no pair stands out."""
    model, blocks, angles = whole(folder)
    x = walked(model, blocks, angles, torch.tensor([prompt(LENGTH)]))[1]

    def energies(block: Block) -> tuple[Tensor, Tensor]:
        q, k, _ = block.heads(block.enter_attention(x), angles)
        q, k = (sum(part.square().mean((0, 1)).chunk(2, -1), torch.zeros(1)) for part in (q, k))
        return q.view(len(k), -1, k.shape[1]).mean(1), k

    before, after = (energies(block) for block in (blocks[1], balance_keys(blocks[1], x, angles, None, torch.float32)))
    cost = [float((q.sum(1) * k.sum(1)).sum()) for q, k in (before, after)]
    assert cost[1] < cost[0]
    ratios = (after[0] / after[1]).log()
    if not blocks[1].config.qk_norm:
        assert float((ratios - ratios.mean(1, keepdim=True)).abs().max()) < 1e-3


def calibrated(text: Path, **fields: object) -> Recipe:
    sizes = {"sources": (str(text),), "sequences": 4, "tokens": 64}
    pages = {"kv_scales": "head", "rotate_keys": True, "key_means": True}
    return Recipe.model_validate({"calibration": sizes, "smooth": (), "gptq": False} | pages | fields)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("Every word of this is read twice. " * 20)
    return path


@pytest.fixture(scope="module")
def made(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    source = write_tiny_model(folder / "model", "hy_v3", num_nextn_predict_layers=1)
    quantize_folder(source, folder / "out", Options("w8a8c8", recipe=calibrated(text, balance_keys=True)))
    return folder / "out"


def test_means_lie_beside_the_index(made: Path) -> None:
    """Readers that take the files of the index find no tensor that they don't know."""
    index = json.loads((made / "model.safetensors.index.json").read_text())
    assert KEY_MEANS not in index["weight_map"].values()
    assert not any(name.endswith("k_mean") for name in index["weight_map"])
    means = load_file(made / KEY_MEANS)
    assert sorted(means) == [f"model.layers.{layer}.self_attn.k_mean" for layer in range(3)]  # a draft layer's too
    assert all(mean.abs().max() > 0 for mean in means.values())
    assert json.loads((made / "config.json").read_text())["quantization_config"]["key_means"] is True


def copied(made: Path, target: Path, means: dict[str, Tensor] | None) -> Path:
    target.mkdir()
    for file in made.iterdir():
        if file.name != KEY_MEANS:
            (target / file.name).symlink_to(file)
    if means is not None:
        save_file(means, target / KEY_MEANS)
    return target


def test_means_that_are_missing_or_misshaped(made: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_mean"
    with pytest.raises(ModelFolderError, match=rf"tensor {name} is missing"):
        load_model(copied(made, tmp_path / "missing", None))
    means = load_file(made / KEY_MEANS)
    with pytest.raises(ModelFolderError, match=rf"tensor {name} has shape \[1, "):
        load_model(copied(made, tmp_path / "misshaped", means | {name: means[name][:1]}))


def test_means_nobody_told_of(made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path / "untold", load_file(made / KEY_MEANS))
    config = json.loads((made / "config.json").read_text())
    del config["quantization_config"]["key_means"]
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match="k_mean"):
        load_model(folder)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"kv_scales": "none"}, "key_means"),
        ({"kv_scales": "none", "key_means": False, "balance_keys": True}, "balance_keys"),
        ({"rotate_keys": False, "balance_keys": True}, "balance_keys"),
    ],
)
def test_where_there_is_nothing_to_gain(text: Path, tmp_path: Path, fields: dict[str, Any], field: str) -> None:
    source = write_tiny_model(tmp_path / "model")
    with pytest.raises(SettingsError) as caught:
        quantize_folder(source, tmp_path / "out", Options("w4a8", recipe=calibrated(text, **fields)))
    assert caught.value.field == field


def test_what_learns_computes_what_is_served(text: Path, tmp_path: Path) -> None:
    """Rows and pages rounded alike: the model that a distillation sees has the served one's logits. No experts, whose
    hidden rows have constant scales when they are served."""
    source, made = write_tiny_model(tmp_path / "model"), tmp_path / "out"
    quantize_folder(source, made, Options("w8a8c8", recipe=calibrated(text, balance_keys=True)))
    config = read_model_config(source)
    files = layer_files(Checkpoint(source), config, Scheme.FP8, page_scales=2, exact_router=False, untie=False)
    _, student, matrices = read_both(Checkpoint(source), made, config, files, "cpu", rotate=True, scales="tensor")
    layers = [stacked_with(layer.block, found) for layer, found in zip(student.layers, matrices, strict=False)]
    ids = [token % config.vocab_size for token in prompt(LENGTH)]
    angles = rotary_angles(rotary_table(config.rope, config.head_dim, LENGTH, torch.device("cpu")), LENGTH)
    found = replace(student, layers=layers, drafts=()).logits(torch.tensor([ids]), angles)[0]
    model = load_model(made, dtype=torch.float32)
    served = model.logits(forward(model, model.new_kv_cache(2), ids, [0, 1]))
    torch.testing.assert_close(found, served, atol=1e-4, rtol=1e-4)


def stacked_with(block: Block, matrices: dict[str, QuantisedMatrix]) -> Layer:
    weights = {f"{name}.weight": matrix.dequantised() for name, matrix in matrices.items()}
    return stacked(replace(block, tensors=block.tensors | weights))
