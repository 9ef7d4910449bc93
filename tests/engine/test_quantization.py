"""What is read of ``quantization_config``, and how the rest is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from katydid_engine.config_fields import ConfigFields
from katydid_engine.quantization import (
    UNQUANTISED,
    Scheme,
    StoredQuantization,
    kv_dtype,
    read_quantization,
    scheme_to_apply,
)
from katydid_runtime.errors import ModelFolderError, SettingsError

FP8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        }
    },
}
W4A8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The config with one field, named by its path, set to a value."""
    config = copy.deepcopy(config)
    *parents, name = path.split(".")
    at = config
    for parent in parents:
        at = at[parent]
    at[name] = value
    return config


def read(config: Any) -> StoredQuantization:
    return read_quantization(ConfigFields(Path("config.json"), {"quantization_config": config}))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, UNQUANTISED),
        ({"quant_method": "fp8"}, StoredQuantization(Scheme.FP8)),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            StoredQuantization(Scheme.FP8, static_inputs=True),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
            StoredQuantization(Scheme.FP8, blocks=True),
        ),
        (FP8, StoredQuantization(Scheme.FP8, static_inputs=True)),
        (
            changed(FP8, "config_groups.group_0.input_activations.dynamic", True),
            StoredQuantization(Scheme.FP8),
        ),
        (W4A8, StoredQuantization(Scheme.W4A8)),
        (
            changed(W4A8, "kv_cache_scheme", {"num_bits": 8, "type": "float", "dynamic": False}),
            StoredQuantization(Scheme.W4A8, kv_cache=True),
        ),
    ],
)
def test_read(config: Any, expected: StoredQuantization) -> None:
    assert read(config) == expected


@pytest.mark.parametrize(
    ("config", "field", "allowed"),
    [
        ("fp8", "", "an object"),
        ({"quant_method": "awq"}, "quant_method", "one of fp8, compressed-tensors"),
        ({"quant_method": "fp8", "activation_scheme": "some"}, "activation_scheme", "dynamic, static"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size", "[128, 128]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt", "e4m3"),
        (changed(FP8, "format", "nvfp4-pack-quantized"), "format", "float-quantized, pack-quantized"),
        (changed(FP8, "config_groups", {}), "config_groups", "at least one group"),
        (changed(FP8, "config_groups.group_0.weights", None), "config_groups.group_0.weights", "an object"),
        (changed(FP8, "config_groups.group_0.weights.num_bits", 4), "config_groups.group_0.weights.num_bits", "8"),
        (
            changed(FP8, "config_groups.group_0.input_activations.strategy", "token"),
            "config_groups.group_0.input_activations.strategy",
            "one of tensor",
        ),
        (
            changed(W4A8, "config_groups.group_0.weights.group_size", 32),
            "config_groups.group_0.weights.group_size",
            "128",
        ),
        (
            changed(W4A8, "config_groups.group_0.weights.symmetric", False),
            "config_groups.group_0.weights.symmetric",
            "True",
        ),
        (
            changed(W4A8, "config_groups.group_0.weights.actorder", "group"),
            "config_groups.group_0.weights.actorder",
            "consecutive columns",
        ),
        (
            changed(W4A8, "config_groups.group_0.input_activations", None),
            "config_groups.group_0.input_activations",
            "an object",
        ),
        (
            changed(W4A8, "config_groups.group_1", FP8["config_groups"]["group_0"]),
            "config_groups.group_1.weights.num_bits",
            "4",
        ),
        (changed(FP8, "kv_cache_scheme", {"num_bits": 4}), "kv_cache_scheme.num_bits", "8"),
    ],
)
def test_refused(config: Any, field: str, allowed: str) -> None:
    with pytest.raises(ModelFolderError) as caught:
        read(config)
    assert caught.value.field == "quantization_config" + (f".{field}" if field else "")
    assert allowed in caught.value.message
    assert "config.json" in caught.value.message


def test_groups_of_two_kinds() -> None:
    dynamic = changed(FP8, "config_groups.group_0.input_activations.dynamic", True)["config_groups"]["group_0"]
    with pytest.raises(ModelFolderError, match="groups of a format that quantise alike"):
        read(changed(FP8, "config_groups.group_1", dynamic))


def test_scheme_to_apply() -> None:
    stored = StoredQuantization(Scheme.FP8)
    assert scheme_to_apply("auto", stored) is Scheme.NONE
    assert scheme_to_apply("fp8", stored) is Scheme.NONE
    assert scheme_to_apply("fp8", UNQUANTISED) is Scheme.FP8
    with pytest.raises(SettingsError, match="stored as fp8"):
        scheme_to_apply("w4a8", stored)


def test_kv_dtype() -> None:
    calibrated = StoredQuantization(Scheme.FP8, kv_cache=True)
    assert kv_dtype("auto", UNQUANTISED, "bfloat16") == "bfloat16"
    assert kv_dtype("auto", calibrated, "bfloat16") == "float8_e4m3fn"
    assert kv_dtype("fp8", UNQUANTISED, "bfloat16") == "float8_e4m3fn"
