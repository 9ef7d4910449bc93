"""What the loader accepts (spellings, shards, dtypes) and how it refuses what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from katydid_engine.loader import build_model, load_model
from katydid_engine.model_config import read_model_config
from katydid_engine.weights import RandomSource
from katydid_runtime.errors import ModelFolderError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.models.families import forward, make_family, prompt

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_family(name, tmp_path_factory.mktemp(name)).folder for name in ("llama", "hy_v3")}


@pytest.fixture
def variant(saved: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a folder with its tensors changed."""

    def make(name: str, change: Callable[[Tensors], Tensors], **config: object) -> Path:
        fields = json.loads((saved[name] / "config.json").read_text()) | config
        (tmp_path / "config.json").write_text(json.dumps(fields))
        save_file(change(load_file(saved[name] / "model.safetensors")), tmp_path / "model.safetensors")
        return tmp_path

    return make


def logits_of(folder: Path) -> Tensor:
    model = load_model(folder)
    return model.logits(forward(model, model.new_kv_cache(2), prompt(70), [0, 1]))


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    def new_name(name: str) -> str:
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    changed = {new_name(name): tensor for name, tensor in tensors.items()}
    assert changed.keys() != tensors.keys()
    return changed


def with_fused_experts(tensors: Tensors) -> Tensors:
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(8)])
            for part in ("gate", "up", "down")
        )
        fused[f"{prefix}gate_up_proj"] = torch.cat((gate, up), dim=1)
        fused[f"{prefix}down_proj"] = down
    return fused


def test_hub_spelling_is_what_transformers_saves(saved: dict[str, Path]) -> None:
    names = load_file(saved["hy_v3"] / "model.safetensors").keys()
    assert {"model.layers.1.mlp.router.gate.weight", "model.layers.1.mlp.expert_bias"} <= names
    assert "model.layers.1.mlp.shared_mlp.up_proj.weight" in names


def test_module_spelling(saved: dict[str, Path], variant: Callable[..., Path]) -> None:
    pairs = [("router.gate.", "gate."), ("expert_bias", "e_score_correction_bias"), ("shared_mlp", "shared_experts")]
    folder = variant("hy_v3", lambda tensors: renamed(tensors, *pairs))
    assert torch.equal(logits_of(folder), logits_of(saved["hy_v3"]))


def test_fused_experts(saved: dict[str, Path], variant: Callable[..., Path]) -> None:
    assert torch.equal(logits_of(variant("hy_v3", with_fused_experts)), logits_of(saved["hy_v3"]))


def test_released_config_spelling(saved: dict[str, Path], tmp_path: Path) -> None:
    """The hub's config has no mlp_layer_types and calls the experts' width expert_hidden_dim."""
    fields = json.loads((saved["hy_v3"] / "config.json").read_text())
    del fields["mlp_layer_types"]
    fields["expert_hidden_dim"] = fields.pop("moe_intermediate_size")
    fields["first_k_dense_replace"] = 1
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_model_config(tmp_path) == read_model_config(saved["hy_v3"])


def test_tied_head_ignores_a_stored_one(saved: dict[str, Path], variant: Callable[..., Path]) -> None:
    folder = variant("llama", lambda tensors: tensors | {"lm_head.weight": torch.zeros(320, 64)})
    assert torch.equal(logits_of(folder), logits_of(saved["llama"]))


def test_sharded_index(saved: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(saved["llama"] / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in halves.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    (tmp_path / "config.json").write_text((saved["llama"] / "config.json").read_text())
    index = {"weight_map": {name: file for file, members in halves.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits_of(tmp_path), logits_of(saved["llama"]))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"names shards that are absent: b\.safetensors"):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_compute_in_fp32(
    saved: dict[str, Path], variant: Callable[..., Path], dtype: torch.dtype
) -> None:
    folder = variant("llama", lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    model = load_model(folder)
    assert model.dtype == torch.float32
    deviation = (logits_of(folder) - logits_of(saved["llama"])).abs().max()
    assert 0 < deviation < 1.0  # weights rounded to 8 bits; the logits' own deviation is about 10


def test_bf16_compute(saved: dict[str, Path]) -> None:
    model = load_model(saved["hy_v3"], dtype=torch.bfloat16)
    cache = model.new_kv_cache(2)
    assert cache.k_pages[0].dtype == torch.bfloat16
    hidden = forward(model, cache, prompt(70), [0, 1])
    assert hidden.dtype == torch.bfloat16
    assert model.logits(hidden).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        (
            lambda t: {k: v for k, v in t.items() if k != "model.layers.1.self_attn.o_proj.weight"},
            "model.layers.1.self_attn.o_proj.weight",
            r"is missing, expected shape \[64, 64\]",
        ),
        (
            lambda t: t | {"model.norm.weight": torch.ones(65)},
            "model.norm.weight",
            r"has shape \[65\], expected \[64\]",
        ),
        (
            lambda t: t | {"model.layers.0.mlp.up_proj.weight": torch.ones(64, 96)},
            "model.layers.0.mlp.up_proj.weight",
            r"has shape \[64, 96\], expected \[96, 64\]",
        ),
        (
            lambda t: t | {"model.norm.weight": torch.ones(64, dtype=torch.int32)},
            "model.norm.weight",
            "has type I32, expected one of BF16, F16, F32",
        ),
        (
            lambda t: t | {f"model.layers.0.extra.{i}": torch.ones(2) for i in range(7)},
            "model.layers.0.extra.0",
            "7 unexpected tensors for model_type llama: .*extra.4 and 2 more",
        ),
    ],
    ids=["missing", "vector", "transposed", "integers", "unexpected"],
)
def test_wrong_tensors(
    variant: Callable[..., Path], change: Callable[[Tensors], Tensors], field: str, message: str
) -> None:
    with pytest.raises(ModelFolderError, match=message) as caught:
        load_model(variant("llama", change))
    assert caught.value.field == field


def _truncate(data: bytes) -> bytes:
    return data[:-10]


def _long_header(data: bytes) -> bytes:
    return (1 << 60).to_bytes(8, "little") + data[8:]


def _broken_json(data: bytes) -> bytes:
    return data[:8] + b"[" + data[9:]


def _moved_tensor(data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["data_offsets"] = [0, 8]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _no_shape(data: bytes) -> bytes:
    text = json.dumps({"model.norm.weight": {"dtype": "F32"}}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "lies at bytes|tensors end at byte"),
        (_long_header, "it claims 1152921504606846976 bytes"),
        (_broken_json, "not JSON|expected an object"),
        (_moved_tensor, r"tensor model\.norm\.weight of F32 \[64\] spans 8 bytes"),
        (_no_shape, r"tensor model\.norm\.weight lacks dtype, shape or data_offsets"),
        (lambda _: b"\x01", "it claims 1 bytes, the file has 1"),
        (lambda data: data + b"tail", "tensors end at byte"),
    ],
)
def test_corrupt_header(saved: dict[str, Path], tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    (tmp_path / "config.json").write_text((saved["llama"] / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(damage((saved["llama"] / "model.safetensors").read_bytes()))
    with pytest.raises(ModelFolderError, match=f"corrupt safetensors header: .*({message})"):
        load_model(tmp_path)


def test_no_shards(saved: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((saved["llama"] / "config.json").read_text())
    with pytest.raises(ModelFolderError, match=r"no \*\.safetensors file"):
        load_model(tmp_path)


def test_same_tensor_in_two_shards(saved: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((saved["llama"] / "config.json").read_text())
    for name in ("a", "b"):
        save_file({"model.norm.weight": torch.ones(64)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelFolderError, match=r"model\.norm\.weight stands in both a\.safetensors and b\.safetensors"):
        load_model(tmp_path)


def test_random_source_builds_any_config(saved: dict[str, Path]) -> None:
    """Timing needs no checkpoint; the same name gives the same values."""
    config = read_model_config(saved["hy_v3"])
    outputs = []
    for _ in range(2):
        model = build_model(config, RandomSource())
        outputs.append(forward(model, model.new_kv_cache(1), prompt(9), [0]))
    assert torch.equal(*outputs)
    assert outputs[0].isfinite().all()
