"""Folders quantised by data: nearer to the original than rounding, interrupted anywhere, and what a recipe refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from katydid_engine.loader import load_model
from katydid_engine.quantize import SCHEMES, Options, Recipe, quantize_folder, read_recipe
from katydid_runtime.errors import ModelFolderError, SettingsError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.engine.models.families import forward
from tests.tiny_model import write_tiny_model

SIZES: dict[str, Any] = {"sources": ("text",), "sequences": 12, "tokens": 128}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes with some order in them."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(words(300, seed=0))
    return path


def words(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(7)
    known = ["".join(chr(97 + int(c)) for c in torch.randint(26, (5,), generator=generator)) for _ in range(40)]
    return " ".join(known[int(i)] for i in torch.randint(40, (count,), generator=generator.manual_seed(seed)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source") / "model", "hy_v3", num_nextn_predict_layers=1)


def recipe(text: Path, **fields: Any) -> Recipe:
    return Recipe.model_validate({"calibration": SIZES | {"sources": (str(text),)}} | fields)


def ids_of(folder: Path) -> list[int]:
    """Text like that of the calibration, which is not part of it."""
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(words(20, seed=1)).ids


def logits_of(path: Path, **options: str) -> Tensor:
    model = load_model(path, dtype=torch.float32, **options)
    return model.logits(forward(model, model.new_kv_cache(2), ids_of(path), [0, 1]))


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("architecture", ["llama", "hy_v3"])
def test_nearer_than_rounding(source: Path, text: Path, tmp_path: Path, architecture: str) -> None:
    if architecture == "llama":
        source = write_tiny_model(tmp_path / "model", "llama")
    wanted = logits_of(source)
    quantize_folder(source, tmp_path / "nearest", Options("w4a8"))
    options = Options("w4a8", recipe=recipe(text, distill={"steps": 20, "sequences": 8}))
    summary = quantize_folder(source, tmp_path / "recipe", options)
    report = json.loads((tmp_path / "recipe" / "quantization-report.json").read_text())
    errors = [kind for layer in report["layers"] for kind in layer["relative_error"].values()]
    assert sum(kind["recipe"] for kind in errors) < 0.9 * sum(kind["nearest"] for kind in errors)
    assert len(report["distillation_loss"]) == 20
    page = (tmp_path / "recipe" / "quantization-report.html").read_text()
    assert page.count("<svg") >= 6
    if architecture == "llama":  # random routers flip, and logits with them
        nearest, found = (float((logits_of(tmp_path / name) - wanted).norm()) for name in ("nearest", "recipe"))
        assert found < 0.7 * nearest
    else:
        assert logits_of(tmp_path / "recipe").isfinite().all()
        assert summary.matrices == 4 * 3 + 3 + 2 * 9 * 3
        assert [layer["layer"] for layer in report["layers"]] == [0, 1, 2]
        assert len(report["layers"][1]["expert_tokens"]) == 8


def test_an_interrupted_run_ends_in_the_same_bytes(source: Path, text: Path, tmp_path: Path) -> None:
    learning = {"steps": 2, "calibration": SIZES | {"sources": (str(text),), "sequences": 6}}
    pages = {"kv_scales": "tensor", "rotate_keys": True, "key_means": True, "balance_keys": True}
    options = Options("w4a8", recipe=recipe(text, fp8=("shared",), distill=learning, **pages))
    said: list[str] = []
    quantize_folder(source, tmp_path / "whole", options, progress=lambda total, done, what: said.append(what))
    stops = len(said)
    for stop in range(0, stops, 3):  # in the same folder, one step further every time
        left = [stop]

        def interrupt(total: int, done: int, what: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        try:
            quantize_folder(source, tmp_path / "out", options, progress=interrupt)
        except KeyboardInterrupt:
            continue
        break
    if not (tmp_path / "out").exists():
        quantize_folder(source, tmp_path / "out", options)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_some_parts_in_e4m3(source: Path, text: Path, tmp_path: Path) -> None:
    made = recipe(text, fp8=("attention", "draft"), fp8_layers=(0,), gptq=False, distill={"steps": 2})
    told: list[tuple[int, int, str]] = []
    quantize_folder(
        source, tmp_path / "out", Options("w4a8", recipe=made), progress=lambda *progress: told.append(progress)
    )
    layers, learning = told[:-2], told[-2:]
    assert layers[-1][0] == layers[-1][1] > 0  # bytes
    assert [progress[:2] for progress in learning] == [(2, 1), (2, 2)]
    assert all(progress[2].startswith("distilling, loss ") for progress in learning)
    tensors = {name: t for path in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(path).items()}
    for name in ("1.self_attn.q_proj", "2.self_attn.o_proj", "2.mlp.experts.0.up_proj", "0.mlp.up_proj"):
        assert tensors[f"model.layers.{name}.weight"].dtype == torch.float8_e4m3fn
    for name in ("1.mlp.experts.0.up_proj", "1.mlp.shared_mlp.down_proj"):
        assert f"model.layers.{name}.weight_packed" in tensors
    assert logits_of(tmp_path / "out").isfinite().all()


@pytest.mark.parametrize(
    ("scheme", "kv_scales", "means"),
    [("w8a8c8", "tensor", False), ("w8a8c8", "head", False), ("w4a8", "head", False), ("w8a8c8", "head", True)],
)
def test_pages_over_calibrated_scales(
    source: Path, text: Path, tmp_path: Path, scheme: str, kv_scales: str, means: bool
) -> None:
    made = recipe(text, kv_scales=kv_scales, rotate_keys=True, key_means=means, balance_keys=means, smooth=())
    quantize_folder(source, tmp_path / "out", Options(scheme, recipe=made))
    tensors = {name: t for path in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(path).items()}
    for layer in range(3):
        assert tensors[f"model.layers.{layer}.self_attn.k_scale"].numel() == (2 if kv_scales == "head" else 1)
    model = load_model(tmp_path / "out", dtype=torch.float32)
    cache = model.new_kv_cache(2)
    assert cache.k_pages[0].dtype == torch.float8_e4m3fn
    found = model.logits(forward(model, cache, ids_of(source), [0, 1]))
    for key in (cache.k_pages[1], cache.v_pages[1]):
        assert 100 < key.float().abs().amax() <= 448  # the range is used and not left
    wanted = logits_of(source)
    uncalibrated = logits_of(source, quantization=SCHEMES[scheme].value, kv_cache_dtype="fp8")
    assert (found - wanted).norm() < 1.5 * (uncalibrated - wanted).norm()


@pytest.mark.parametrize("scales", ["channel", "block"])
@pytest.mark.parametrize("architecture", ["llama", "hy_v3"])
def test_scales_of_rows_and_blocks(text: Path, tmp_path: Path, architecture: str, scales: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "moe_intermediate_size": 128}
    source = write_tiny_model(tmp_path / "model", architecture, **sizes)
    out = tmp_path / "out"
    quantize_folder(source, out, Options("w8a8", recipe=recipe(text, fp8_scales=scales, smooth=(), gptq=False)))
    wanted, found = logits_of(source), logits_of(out)
    nearest = logits_of(source, quantization="fp8")
    assert (found - wanted).norm() < 1.2 * (nearest - wanted).norm()
    learned = recipe(text, fp8_scales=scales, distill={"steps": 4, "rounding_rate": 0.001})
    quantize_folder(source, tmp_path / "learned", Options("w8a8", recipe=learned))
    assert (logits_of(tmp_path / "learned") - wanted).norm() < 1.5 * (nearest - wanted).norm()


@pytest.mark.parametrize(("scheme", "message"), [("w4a8", "one scale each"), ("w8a8", "no whole blocks of 128 x 128")])
def test_blocks_that_cannot_be(source: Path, text: Path, tmp_path: Path, scheme: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        quantize_folder(source, tmp_path / "out", Options(scheme, recipe=recipe(text, fp8_scales="block")))


def test_rotated_residual(text: Path, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", "llama", tie_word_embeddings=True)
    made = recipe(text, rotate_residual=True, gptq=False, smooth=())
    quantize_folder(source, tmp_path / "out", Options("w8a8", recipe=made))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    wanted = logits_of(source)
    assert (logits_of(tmp_path / "out") - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"calibration": {"sources": ["/nowhere.txt"]}}, "does not exist"),
        ({"calibration": {"sources": ["python:no_such_package"]}}, "no package 'no_such_package' is installed"),
        ({"calibration": {"sources": ["{text}"], "sequences": 1000}}, r"has 1\d+ tokens, 1000 sequences of 2048"),
        ({"calibration": {"sources": ["{text}"], "tokens": 5000}}, "the model has 4096 positions"),
        ({"fp8_layers": [0, 3]}, "fp8_layers: 3, the model's last layer is 2"),
        ({"rotate_residual": True}, "draft layers read hidden states"),
        ({"distill": {"calibration": {"sources": ["{text}"], "tokens": 5000}}}, "the model has 4096 positions"),
        (
            {
                "calibration": {"sources": ["{text}"], "sequences": 1, "tokens": 64},
                "distill": {"calibration": {"sources": ["/nowhere.txt"]}},
            },
            "does not exist",
        ),
    ],
)
def test_calibration_that_cannot_be_had(
    source: Path, text: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(fields).replace("{text}", str(text)))
    with pytest.raises(SettingsError, match=message):
        quantize_folder(source, tmp_path / "out", Options("w4a8", recipe=read_recipe(path)))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ("clip: hard", "clip"),
        ("gptq: {damping: 0}", "gptq.damping"),
        ("gptq: {order: true}", "gptq.order"),
        ("smooth: [heads]", "smooth.0"),
        ("calibration: {sequences: many}", "calibration.sequences"),
        ("calibration: {sources: []}", "calibration.sources"),
        ("distill: {learning_rate: .nan}", "distill.learning_rate"),
        ("distill: {rounding_rate: -1}", "distill.rounding_rate"),
        ("fp8: [experts]", "fp8.0"),
        ("fp8_layers: [-1]", "fp8_layers.0"),
        ("fp8_scales: row", "fp8_scales"),
        ("- clip", "recipe"),
        ("gptq: [", "recipe"),
    ],
)
def test_bad_recipes(tmp_path: Path, body: str, field: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(body)
    with pytest.raises(SettingsError) as caught:
        read_recipe(path)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        ("gpu: h200", "calibration, smooth, fp8, "),
        ("gptq: {order: true}", "damping, act_order, "),
        ("distill: {calibration: {steps: 2}}", "sources, sequences, tokens, seed"),
        ("gptq: 7", "a mapping"),
    ],
)
def test_a_field_that_is_none_is_told_which_there_are(tmp_path: Path, body: str, allowed: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(body)
    with pytest.raises(SettingsError) as caught:
        read_recipe(path)
    assert str(caught.value.allowed).startswith(allowed)


def test_recipe_files(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for empty in ("", "# gptq: false\n"):
        path.write_text(empty)
        with pytest.raises(SettingsError, match="is empty; a recipe of nothing but defaults is"):
            read_recipe(path)
    path.write_text("{}")
    assert read_recipe(path) == Recipe()
    path.write_text("gptq: false\ndistill: false\ncalibration: {sources: [generated], tokens: 64}\n")
    assert read_recipe(path).gptq is None
    with pytest.raises(SettingsError, match="can't be read"):
        read_recipe(tmp_path / "nowhere.yaml")
    with pytest.raises(SettingsError, match="needs a recipe with kv_scales"):
        Options("w8a8c8", recipe=Recipe())


def test_nothing_to_learn(source: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="rounding_rate is 0"):
        quantize_folder(source, tmp_path / "out", Options("w8a8", recipe=recipe(text, distill={"rounding_rate": 0.0})))


def test_rows_that_are_not_finite(source: Path, text: Path, tmp_path: Path) -> None:
    damaged = write_tiny_model(tmp_path / "model", "hy_v3")
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"].fill_(3e38)
    save_file(tensors, damaged / "model.safetensors")
    with pytest.raises(ModelFolderError, match="not finite"):
        quantize_folder(damaged, tmp_path / "out", Options("w4a8", recipe=recipe(text, smooth=())))


def test_generated_rows(source: Path, tmp_path: Path) -> None:
    made = Recipe.model_validate({"calibration": {"sources": ("generated",), "sequences": 2, "tokens": 32}})
    for name in ("one", "two"):
        quantize_folder(source, tmp_path / name, Options("w4a8", recipe=made))
    assert files(tmp_path / "one") == files(tmp_path / "two")
