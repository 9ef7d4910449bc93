"""Model identity: everything that decides a page's bytes changes it, nothing else does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from katydid_engine.checkpoint import KEY_MEANS
from katydid_engine.identity import SIDECAR, model_identity
from katydid_runtime.errors import ModelFolderError
from safetensors.torch import save_file

from tests.tiny_model import write_tiny_model


def identity(folder: Path, dtype: str = "float32") -> bytes:
    return model_identity(folder, kv_dtype=dtype, compute_dtype=dtype)


def test_same_content_is_the_same_model_wherever_it_lies(tmp_path: Path) -> None:
    first, second = (identity(write_tiny_model(tmp_path / name)) for name in ("a", "b"))
    assert first == second
    assert len(first) == 32


def test_weights_config_and_dtype_count(tmp_path: Path) -> None:
    base = identity(write_tiny_model(tmp_path / "base"))
    means = write_tiny_model(tmp_path / "means")
    save_file({"model.layers.0.self_attn.k_mean": torch.ones(2, 8)}, means / KEY_MEANS)
    others = [
        identity(means),
        identity(write_tiny_model(tmp_path / "weights", seed=1)),
        identity(write_tiny_model(tmp_path / "config", rope_theta=5000.0)),
        identity(tmp_path / "base", "bfloat16"),
    ]
    assert len({base, *others}) == 5


def test_a_changed_shard_is_read_again_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    base = identity(folder)
    sidecar = folder / SIDECAR
    digests = json.loads(sidecar.read_text())
    digests["model.safetensors"]["sha256"] = "00" * 32
    sidecar.write_text(json.dumps(digests))
    assert identity(folder) != base, "the sidecar was believed"
    os.utime(folder / "model.safetensors")
    assert identity(folder) == base
    sidecar.write_text("not json")
    assert identity(folder) == base


def test_no_model_no_identity(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        identity(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFolderError, match="safetensors"):
        identity(tmp_path)
