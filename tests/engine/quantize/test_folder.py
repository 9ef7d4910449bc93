"""Quantised copies of a folder: what an engine makes of them, interrupted runs, and what stands in the way."""

from __future__ import annotations

import errno
import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from katydid_engine.identity import SIDECAR
from katydid_engine.loader import load_model
from katydid_engine.quantize import SCHEMES, Options, partial_folder, quantize_folder
from katydid_runtime.errors import ModelFolderError, SettingsError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.models.families import forward, prompt
from tests.tiny_model import write_tiny_model

SMALL = 40_000  # bytes a shard, so that there are several


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = write_tiny_model(tmp_path / "model", "hy_v3")
    (made / SIDECAR).write_text("{}")
    return made


def logits_of(path: Path, **options: str) -> Tensor:
    model = load_model(path, **options)
    return model.logits(forward(model, model.new_kv_cache(2), [token % 272 for token in prompt(70)], [0, 1]))


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_serves_as_if_quantised_while_loading(source: Path, tmp_path: Path, scheme: str) -> None:
    seen: list[tuple[int, int]] = []
    options = Options(scheme, shard_bytes=SMALL)
    summary = quantize_folder(
        source, tmp_path / "out", options, progress=lambda total, done, what: seen.append((done, total))
    )
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(source, quantization=SCHEMES[scheme].value))
    assert summary.matrices == 4 * 2 + 3 + 9 * 3
    assert summary.target_bytes < summary.source_bytes / 2
    assert seen == sorted(seen)
    assert seen[-1] == (summary.source_bytes, summary.source_bytes)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert len([name for name in names if name.endswith(".safetensors")]) > 2
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"} <= names
    assert not names & {SIDECAR, "katydid-quantize.json", "model.safetensors"}
    assert not (tmp_path / "out.partial").exists()


def test_scales_with_least_error_are_nearer(source: Path, tmp_path: Path) -> None:
    plain = logits_of(source)
    errors = []
    for clip in ("none", "mse"):
        quantize_folder(source, tmp_path / clip, Options("w4a8", clip=clip))
        errors.append((logits_of(tmp_path / clip) - plain).norm())
    assert errors[1] < errors[0]


def test_an_interrupted_run_ends_in_the_same_bytes(source: Path, tmp_path: Path) -> None:
    options = Options("w4a8", shard_bytes=SMALL)
    quantize_folder(source, tmp_path / "whole", options)

    def interrupt(total: int, done: int, what: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, tmp_path / "out", options, progress=interrupt)
    assert not (tmp_path / "out").exists()
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.partial").glob("*.safetensors")}
    assert finished
    quantize_folder(source, tmp_path / "out", options)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in finished} == finished


def test_joined_experts(source: Path, tmp_path: Path) -> None:
    """One tensor for all experts, as transformers saves them, gives the same folder as one an expert."""
    joined = tmp_path / "joined"
    shutil.copytree(source, joined)
    tensors = load_file(source / "model.safetensors")
    prefix = "model.layers.1.mlp.experts"
    gate, up, down = (
        torch.stack([tensors.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(8)])
        for part in ("gate", "up", "down")
    )
    tensors |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}.down_proj": down}
    save_file(tensors, joined / "model.safetensors")
    for name in ("model", "joined"):
        quantize_folder(tmp_path / name, tmp_path / f"{name}-out", Options("w8a8"))
    assert torch.equal(logits_of(tmp_path / "joined-out"), logits_of(tmp_path / "model-out"))


def test_quantised_already(source: Path, tmp_path: Path) -> None:
    quantize_folder(source, tmp_path / "once", Options("w8a8"))
    with pytest.raises(ModelFolderError, match="is quantised already"):
        quantize_folder(tmp_path / "once", tmp_path / "twice", Options("w8a8"))


def _cut(path: Path) -> None:
    shard = path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])


def _infinite(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][3, 3] = torch.inf
    save_file(tensors, path / "model.safetensors")


def _another_model(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: shutil.rmtree(path), "no such file; expected a Hugging Face model folder"),
        (lambda path: (path / "model.safetensors").unlink(), r"no \*\.safetensors file"),
        (_another_model, "model_type is 'gpt2'"),
        (_cut, "corrupt safetensors header"),
        (_infinite, "q_proj.weight holds NaN or infinity"),
    ],
)
def test_wrong_sources(source: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(source)
    with pytest.raises(ModelFolderError, match=message):
        quantize_folder(source, tmp_path / "out", Options("w4a8"))
    assert not (tmp_path / "out").exists()


def test_targets_in_the_way(source: Path, tmp_path: Path) -> None:
    for name in ("file", "folder"):
        out = tmp_path / name
        if name == "folder":
            out.mkdir()
            out = out / "child"
        out.write_text("")
        with pytest.raises(SettingsError, match="is not empty") as caught:
            quantize_folder(source, tmp_path / name, Options("w8a8"))
        assert caught.value.field == "out"
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(SettingsError, match=r"out\.partial is left from another run"):
        quantize_folder(source, tmp_path / "out", Options("w8a8"))


def test_what_an_interrupted_run_left_is_not_mixed_with_another(source: Path, tmp_path: Path) -> None:
    def stop(total: int, done: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, tmp_path / "out", Options("w8a8"), progress=stop)
    with pytest.raises(SettingsError, match="left from another run"):
        quantize_folder(source, tmp_path / "out", Options("w4a8"))


def test_too_little_room(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_folder.shutil, "disk_usage", lambda path: namedtuple("usage", "free")(1000))
    with pytest.raises(SettingsError, match=r"the disk is full \(\d+ bytes are needed, 1000 are free\)"):
        quantize_folder(source, tmp_path / "out", Options("w8a8"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("number", "message"), [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "cannot be written")]
)
def test_writes_that_fail(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    """The folder can be finished once there is room."""

    def fail(descriptor: int) -> None:
        raise OSError(number, "no")

    with monkeypatch.context() as patch:
        patch.setattr(partial_folder.os, "fsync", fail)
        with pytest.raises(SettingsError, match=message):
            quantize_folder(source, tmp_path / "out", Options("w8a8"))
    assert not list((tmp_path / "out.partial").glob("*.unfinished"))
    quantize_folder(source, tmp_path / "out", Options("w8a8"))
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(("field", "value"), [("scheme", "int2"), ("clip", "hard"), ("device", "cuda")])
def test_wrong_options(source: Path, tmp_path: Path, field: str, value: str) -> None:
    if field == "device" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SettingsError) as caught:
        quantize_folder(source, tmp_path / "out", Options(**{field: value}))
    assert caught.value.field == field
